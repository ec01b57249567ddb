"""k_norm against torch's own norm; `tests/fit/recipes/test_normalise.py` has a live model's."""

from __future__ import annotations

import pytest
import torch

from kvhub_kernels.normalise import EPSILON, normalise, normalise_
from kvhub_kernels.workspace import Workspace


def drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(7, 3, 16, generator=generator, dtype=dtype) * 5
    return keys, torch.randn(16, generator=generator)


def test_the_same_as_torch() -> None:
    keys, weight = drawn()
    wanted = torch.nn.functional.rms_norm(keys, (16,), weight, EPSILON)
    torch.testing.assert_close(normalise(keys, weight), wanted, rtol=1e-6, atol=1e-6)


def test_in_place_whatever_the_strides() -> None:
    keys, weight = drawn()
    wanted = normalise(keys.double(), weight)
    assert wanted.dtype == torch.float64
    space = Workspace()
    for rows in (keys.clone(), keys.transpose(0, 1).contiguous().transpose(0, 1)):
        found = normalise_(rows, weight, space)
        assert found.data_ptr() == rows.data_ptr()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    keys, weight = drawn()
    keys[2, 1, 3] = bad
    for found in (normalise(keys, weight), normalise_(keys.clone(), weight, Workspace())):
        assert not found[2, 1].isfinite().all()
        found[2, 1] = 0
        assert found.isfinite().all()


def test_gradients_know_no_length() -> None:
    keys, weight = drawn(torch.float64)
    keys.requires_grad_(True)
    other = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (normalise(keys, weight) * other).sum().backward()
    assert keys.grad is not None
    along = (keys.grad * keys.detach()).sum(-1)
    assert float(along.abs().max()) < 1e-6 * float(keys.grad.norm(dim=-1).max())
    assert torch.autograd.gradcheck(lambda k: normalise(k, weight.double()), keys[:2])
