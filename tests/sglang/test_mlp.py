"""A handoff through a mapper of the mlp family, on SGLang's real tree, allocator and pool."""

from __future__ import annotations

from pathlib import Path

import torch
from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

from kvhub.artifact.manifest import Perceptron
from kvhub.artifact.tensors import expected_tensors
from kvhub.mapper.mlp import MlpMapper

PROMPT = [(i * 37 + 11) % 997 for i in range(200)]


def networks() -> MlpMapper:
    manifest = mapper_between(SMALL, LARGE).manifest.model_copy(
        update={"family": "mlp", "perceptron": Perceptron(hidden=[12, 9], per="head")}
    )
    chance = torch.Generator().manual_seed(7)
    shapes = expected_tensors(manifest).items()
    return MlpMapper(manifest, {name: torch.randn(shape, generator=chance) / 4 for name, shape in shapes})


def test_a_switched_conversation_reads_what_map_layer_gives(tmp_path: Path) -> None:
    mapper = networks()
    source, target = Engine(SMALL, tmp_path / "exchange"), Engine(LARGE, tmp_path / "exchange", (mapper,))
    source.run(PROMPT, 4)
    prompt = [*PROMPT, 5, 6, 7]
    running = target.admit(target.request(prompt, ask={"reuse": True}))
    assert (running.meta["mapped"], running.meta["prefilled"]) == (192, 11)
    mapped = mapped_rows(mapper, native_rows(SMALL, prompt[:192], range(192)), range(192))
    assert float(mapped.std()) > 0.1  # the ReLUs let something through
    native = native_rows(LARGE, prompt[192:], range(192, 203))
    torch.testing.assert_close(target.row(running, 203), torch.cat((mapped, native), dim=2))
    target.decode(running, 3)
    target.finish(running)
    source.empty()
    target.empty()
