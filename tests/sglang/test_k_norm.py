"""A handoff whose mapped keys go through the target's k_norm, on SGLang's real tree, allocator and pool."""

from __future__ import annotations

from pathlib import Path

import torch
from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

from kvhub.mapper.ridge import RidgeMapper

PROMPT = [(i * 37 + 11) % 997 for i in range(200)]


def normalised() -> tuple[RidgeMapper, torch.Tensor]:
    plain = mapper_between(SMALL, LARGE)
    norms = 0.5 + torch.rand(2, 8, generator=torch.Generator().manual_seed(3))
    tensors = plain._tensors | {f"layers.{layer}.k.norm": norm for layer, norm in enumerate(norms)}
    return RidgeMapper(plain.manifest.model_copy(update={"family": "ridge-k-norm"}), tensors), norms


def test_a_switched_conversation_has_keys_of_the_targets_length(tmp_path: Path) -> None:
    mapper, norms = normalised()
    source, target = Engine(SMALL, tmp_path / "exchange"), Engine(LARGE, tmp_path / "exchange", (mapper,))
    source.run(PROMPT, 4)
    prompt = [*PROMPT, 5, 6, 7]
    running = target.admit(target.request(prompt, ask={"reuse": True}))
    assert (running.meta["mapped"], running.meta["prefilled"]) == (192, 11)
    mapped = mapped_rows(mapper, native_rows(SMALL, prompt[:192], range(192)), range(192))
    plain = mapped_rows(
        mapper_between(SMALL, LARGE), native_rows(SMALL, prompt[:192], range(192)), range(192)
    )
    assert torch.equal(mapped[:, 1], plain[:, 1]) and not torch.allclose(mapped[:, 0], plain[:, 0])
    # Position 0 is not rotated: there the norm can be read off.
    sizes = (mapped[:, 0, 0] / norms[:, None]).square().mean(-1)
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=1e-3, atol=1e-3)
    native = native_rows(LARGE, prompt[192:], range(192, 203))
    torch.testing.assert_close(target.row(running, 203), torch.cat((mapped, native), dim=2))
    target.decode(running, 3)
    target.finish(running)
    source.empty()
    target.empty()
