"""Registry records for tests: valid, distinct by `seed`, the same for the same arguments."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from kvhub_registry import CalibrationRecord, MapperRecord, ModelRecord


def digest(*parts: object) -> str:
    """A sha256 that depends on `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def model_record(name: str) -> ModelRecord:
    return ModelRecord(
        digest=digest("model", name),
        name=name,
        revision="commit:" + digest("revision", name)[:40],
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        num_layers=4,
        num_kv_heads=2,
        head_dim=16,
    )


def mapper_record(seed: int = 0, *, source: str = "org/small", target: str = "org/large") -> MapperRecord:
    return MapperRecord(
        digest=digest("mapper", seed, source, target),
        family="ridge",
        support="full",
        k=2,
        regularization=1e-3,
        regularization_convention="relative-mean-diagonal",
        exact_prefix=4,
        source=model_record(source),
        target=model_record(target),
        calibration=CalibrationRecord(
            digest=digest("calibration", seed), dataset="fineweb-edu", revision=None, tokens=1024, rows=256
        ),
        created=datetime(2026, 11, 29, 12, seed % 60, tzinfo=UTC),
        path=f"/mappers/{seed}",
        size=1 << 33,
    )
