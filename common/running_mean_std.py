"""Mean and variance of a stream, merged exactly batch by batch and pooled over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class RunningMeanStd(nn.Module):
    """Per-feature population mean and variance of everything `update` has seen; `forward` only reads them.

    Accumulators are float64 and int64: a float32 count stops at 2**24, and E[x^2] - E[x]^2 in float32 loses the
    variance of data far from zero. Before the first update the statistics are mean 0 and variance 1, so that forward is
    the identity.

    Chan, Golub and LeVeque 1979, the pairwise update: http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float = 1e-8):
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def std(self) -> Tensor:
        """Square root of the variance, kept away from zero by eps, float32 [*shape]."""
        return (self.var + self.eps).sqrt().float()

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / std in x's precision, [.., *shape]; not clipped."""
        return (x - self.mean.float()) / self.std()

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of forward, [.., *shape]."""
        return x * self.std() + self.mean.float()

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the rows of x [B, *shape] (all ranks' rows where torch.distributed runs) for which mask [B] is True.

        Only the new rows travel between ranks, as moments about the shared mean: history is never added twice. A batch
        without rows changes nothing.
        """
        deltas = x.double() - self.mean  # about the running mean: squares of small numbers, whatever the offset
        if mask is None:
            n = torch.full((), x.shape[0], dtype=torch.float64, device=x.device)
        else:
            deltas = torch.where(mask.view(-1, *[1] * (x.dim() - 1)), deltas, 0.0)
            n = mask.sum(dtype=torch.float64)
        moments = torch.cat([n.view(1), deltas.sum(0).flatten(), (deltas**2).sum(0).flatten()])
        if dist.is_initialized():
            dist.all_reduce(moments)
        n, (sum1, sum2) = moments[0], moments[1:].view(2, *self.mean.shape)
        old = self.count.double()
        total = (old + n).clamp(min=1)
        shift = sum1 / total
        # Variance about the new mean: (M2_old + sum of d^2) / total - shift^2, with d measured from the old mean.
        var = (self.var * old + sum2) / total - shift**2
        self.var.copy_(torch.where(n > 0, var.clamp(min=0), self.var))
        self.mean.add_(shift)
        self.count.add_(n.long())
