"""A handoff whose mapped keys go through the target's k_norm, on SGLang's real tree, allocator and pool."""

from __future__ import annotations

from pathlib import Path

import torch
from support.pools import LARGE, SMALL, mapped_rows, mapper_between
from support.switching import HISTORY, switched

from kvhub.mapper.ridge import RidgeMapper


def normalised() -> tuple[RidgeMapper, torch.Tensor]:
    plain = mapper_between(SMALL, LARGE)
    norms = 0.5 + torch.rand(2, 8, generator=torch.Generator().manual_seed(3))
    tensors = plain._tensors | {f"layers.{layer}.k.norm": norm for layer, norm in enumerate(norms)}
    return RidgeMapper(plain.manifest.model_copy(update={"family": "ridge-k-norm"}), tensors), norms


def test_a_switched_conversation_has_keys_of_the_targets_length(tmp_path: Path) -> None:
    mapper, norms = normalised()
    with switched(mapper, tmp_path) as mapped:
        plain = mapped_rows(mapper_between(SMALL, LARGE), HISTORY, range(192))
        assert torch.equal(mapped[:, 1], plain[:, 1]) and not torch.allclose(mapped[:, 0], plain[:, 0])
        # Position 0 is not rotated: there the norm can be read off.
        sizes = (mapped[:, 0, 0] / norms[:, None]).square().mean(-1)
        torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=1e-3, atol=1e-3)
