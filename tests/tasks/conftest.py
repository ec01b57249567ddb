from pathlib import Path

import pytest
import torch
from support.mappers import identity_tensors, make_manifest, random_tensors

from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.load import load_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def models():
    return {name: load_model(ROOT / "models" / name, torch.float32) for name in ("small", "large")}


@pytest.fixture
def mapper_between(models):
    """A mapper without a fit: the identity where both sides are one model, else noise."""

    def make(source, target):
        one, two = models[source], models[target]
        manifest = make_manifest(one.identity, two.identity, k=1)
        tensors = identity_tensors(manifest) if source == target else random_tensors(manifest)
        return RidgeMapper(manifest, tensors), one, two

    return make
