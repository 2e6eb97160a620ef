import io

import pytest
import torch

from common.running_mean_std import RunningMeanStd


def test_two_batches_merge_exactly():
    """H8: population variance, no prior weight."""
    rms = RunningMeanStd(1)
    rms.update(torch.tensor([[1.0], [2.0], [3.0]]))
    rms.update(torch.tensor([[10.0], [20.0]]))
    assert rms.mean.item() == pytest.approx(7.2, abs=1e-12)
    assert rms.var.item() == pytest.approx(50.96, abs=1e-12)
    assert rms.count.item() == 5


def test_far_from_zero_and_many_rows():
    rms, generator = RunningMeanStd(1), torch.Generator().manual_seed(0)
    for _ in range(200):
        rms.update(1e4 + 0.1 * torch.randn(1000, 1, generator=generator))
    assert rms.var.item() == pytest.approx(0.01, rel=0.02)
    assert rms.count.item() == 200_000 and rms.count.dtype == torch.int64 and rms.mean.dtype == torch.float64


def test_count_does_not_stop_at_the_end_of_float32():
    rms = RunningMeanStd(1)
    rms.count.fill_(2**24)
    rms.update(torch.ones(1, 1))
    assert rms.count.item() == 2**24 + 1


def test_order_and_batching_do_not_matter():
    x = torch.randn(1000, 3) * torch.tensor([1.0, 10.0, 1e3]) + torch.tensor([0.0, 5.0, -1e4])
    whole, parts = RunningMeanStd(3), RunningMeanStd(3)
    whole.update(x)
    for part in x.flip(0).split(100):
        parts.update(part)
    torch.testing.assert_close(parts.mean, x.double().mean(0), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(parts.var, x.double().var(0, correction=0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole.var, parts.var, rtol=1e-9, atol=1e-9)
    assert len({round(v, 3) for v in parts.var.tolist()}) == 3  # one statistic a feature


def test_mask_counts_valid_rows_only():
    x = torch.randn(50, 2)
    mask = torch.rand(50) < 0.5
    masked, plain = RunningMeanStd(2), RunningMeanStd(2)
    plain.update(x[mask])
    masked.update(torch.where(mask[:, None], x, torch.nan), mask)
    torch.testing.assert_close(masked.mean, plain.mean)
    torch.testing.assert_close(masked.var, plain.var)
    assert masked.count == plain.count == mask.sum()


def test_empty_batches_and_forward_change_nothing():
    rms = RunningMeanStd(2)
    rms.update(torch.randn(10, 2))
    before = {k: v.clone() for k, v in rms.state_dict().items()}
    rms.update(torch.empty(0, 2))
    rms.update(torch.randn(4, 2), torch.zeros(4, dtype=torch.bool))
    for mode in (rms.train(), rms.eval()):
        mode(torch.randn(5, 2))
        mode.denormalize(torch.randn(5, 2))
    assert all(torch.equal(v, before[k]) for k, v in rms.state_dict().items())


def test_mask_of_rows_with_several_axes():
    x, mask = torch.randn(6, 2, 3), torch.tensor([True, False, True, True, False, False])
    masked, plain = RunningMeanStd((2, 3)), RunningMeanStd((2, 3))
    masked.update(x, mask)
    plain.update(x[mask])
    torch.testing.assert_close(masked.var, plain.var)
    assert masked.mean.shape == (2, 3) and masked.count == 3


def test_constant_feature_far_from_zero_stays_finite():
    rms, x = RunningMeanStd(1), torch.full((100, 1), 1e6 + 0.5)
    for _ in range(5):
        rms.update(x)
    assert 0 <= rms.var.item() < 1e-6 and rms(x).abs().max() < 1e-3


def test_without_data_forward_is_the_identity():
    x = torch.randn(5, 2)
    torch.testing.assert_close(RunningMeanStd(2)(x), x)


def test_denormalize_is_the_inverse_without_clipping():
    """H7: peers clamp at five standard deviations and give 507.5 for 1000."""
    x = torch.tensor([[0.0]] * 99 + [[1000.0]])
    rms = RunningMeanStd(1)
    rms.update(x)
    torch.testing.assert_close(rms.denormalize(rms(x)), x, rtol=1e-3, atol=1e-3)
    assert rms(x).dtype == torch.float32


def test_state_loads_as_plain_tensors():
    rms, other, file = RunningMeanStd(2), RunningMeanStd(2), io.BytesIO()
    rms.update(torch.randn(7, 2))
    torch.save(rms.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(rms.buffers(), other.buffers(), strict=True))
