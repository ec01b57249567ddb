"""The fast comparison is the exact one."""

import pytest
import torch

from kvhub.errors import Corrupt
from kvhub.evaluation.metrics import compare_logits
from kvhub.study.compare import Native


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_agrees_with_the_float64_definition(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    native = scale * torch.randn(40, 5000, generator=generator)
    arm = native + 0.3 * scale * torch.randn(40, 5000, generator=generator) + 7.0
    labels = torch.randint(5000, (40,), generator=generator)
    ours, exact = Native(native, labels).sums(arm), compare_logits(native, arm, labels)
    assert ours.nll == pytest.approx(exact.nll, abs=40e-5)
    assert ours.kl == pytest.approx(exact.kl, abs=40e-5)
    assert ours.top1 == exact.top1 < 40
    own, expected = Native(native, labels).own, compare_logits(native, native, labels)
    assert own.nll == pytest.approx(expected.nll, abs=40e-5)
    assert (own.kl, own.top1) == (0.0, 40.0)


def test_nan_is_refused() -> None:
    native = torch.randn(2, 8)
    with pytest.raises(Corrupt):
        Native(native, torch.zeros(2, dtype=torch.int64)).sums(torch.full((2, 8), float("nan")))
