"""One process a GPU (or a CPU slot) under torchrun; every function also works alone, where it does nothing."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import InputError


def init(device_name: str) -> tuple[int, int, torch.device]:
    """Join the process group that torchrun's environment describes; returns rank, world_size and this rank's device.

    WORLD_SIZE > 1 is enough: nccl on CUDA, gloo on CPU. device_name "auto" is CUDA where there is one.
    Raises InputError if the device does not exist.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device_name)
    except RuntimeError:
        raise InputError(f"--device {device_name}: not a torch device; use auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {device_name}: only cpu and cuda are supported (statistics are float64)")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"--device {device_name}: this torch ({torch.__version__}) sees no CUDA GPU; use --device cpu"
            )
        if world_size > 1 and device.index is not None:
            raise InputError(
                f"--device {device_name}: with {world_size} ranks each takes its own GPU; use --device cuda"
            )
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if index >= torch.cuda.device_count():
            raise InputError(f"--device cuda:{index}: there are {torch.cuda.device_count()} GPUs; ranks need one each")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world_size, device


def is_parallel() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def broadcast(module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if is_parallel():
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def average(x: Tensor) -> Tensor:
    """Mean of x over ranks (a new tensor; x itself when alone)."""
    if not is_parallel():
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def average_gradients(parameters: list[nn.Parameter], extra: Tensor) -> Tensor:
    """Replace gradients by their mean over ranks; returns the mean of `extra` [K], from the same flat all-reduce."""
    if not is_parallel():
        return extra
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([*(g.flatten() for g in grads), extra])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat.split([*(g.numel() for g in grads), extra.numel()])
    torch._foreach_copy_(grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=False)])
    return pieces[-1]


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if it is True on one (a stop decision that all ranks take together)."""
    if not is_parallel():
        return flag
    x = torch.tensor(float(flag), device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return bool(x.item())


def gather_objects(x: object) -> list:
    """One Python object a rank, in rank order, on every rank."""
    if not is_parallel():
        return [x]
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, x)
    return objects


def close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
