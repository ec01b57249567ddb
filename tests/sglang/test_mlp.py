"""A handoff through a mapper of the mlp family, on SGLang's real tree, allocator and pool."""

from __future__ import annotations

from pathlib import Path

import torch
from support.pools import LARGE, SMALL, mapper_between
from support.switching import switched

from kvhub.artifact.manifest import Perceptron
from kvhub.artifact.tensors import expected_tensors
from kvhub.mapper.mlp import MlpMapper


def networks() -> MlpMapper:
    manifest = mapper_between(SMALL, LARGE).manifest.model_copy(
        update={"family": "mlp", "perceptron": Perceptron(hidden=[12, 9], per="head")}
    )
    chance = torch.Generator().manual_seed(7)
    shapes = expected_tensors(manifest).items()
    return MlpMapper(manifest, {name: torch.randn(shape, generator=chance) / 4 for name, shape in shapes})


def test_a_switched_conversation_reads_what_map_layer_gives(tmp_path: Path) -> None:
    with switched(networks(), tmp_path) as mapped:
        assert float(mapped.std()) > 0.1  # the ReLUs let something through
