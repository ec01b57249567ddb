"""The directed table: which model is which."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from support.records import mapper_record

from kvhub.errors import BadInput
from kvhub.store.coverage import coverage
from kvhub_registry import MapperRow, State


def row(seed: int, source: str, *, revision: str, digest: str = "") -> MapperRow:
    made = mapper_record(seed, source=source, target="org/Large-7B")
    known = {"revision": revision} | ({"digest": digest} if digest else {})
    fields = made.model_dump() | {
        "source": made.source.model_copy(update=known),
        "target": made.target.model_copy(update={"revision": "f" * 40}),
        "calibration": made.calibration,
        "created": datetime(2026, 1, seed + 1, tzinfo=UTC),
    }
    return MapperRow(
        **fields, state=State.READY, state_reason="passed", changed=datetime(2026, 2, 1, tzinfo=UTC)
    )


def test_two_organisations_are_two_models() -> None:
    rows = [
        row(1, "unsloth/Qwen3-8B", revision="b" * 40),
        row(0, "Qwen/Qwen3-8B", revision="a" * 40),
    ]
    table = coverage(rows)
    assert table.models == ["org/Large-7B", "Qwen/Qwen3-8B", "unsloth/Qwen3-8B"]
    assert table.headings() == ["Large-7B", "Qwen/Qwen3-8B", "unsloth/Qwen3-8B"]
    for one in rows:
        cell = table.cell(one.source.name, "org/Large-7B")
        assert (cell.standing, cell.row) == ("ready", one)
    assert coverage(rows, family="qwen3").models == ["Qwen/Qwen3-8B", "unsloth/Qwen3-8B"]
    served = coverage(rows, served={"Qwen/Qwen3-8B": "cccc"})
    assert served.cell("Qwen/Qwen3-8B", "org/Large-7B").standing == "stale"
    assert served.cell("unsloth/Qwen3-8B", "org/Large-7B").standing == "ready"
    for asked in ({"served": {"qwen3-8b": "cccc"}}, {"models": ["qwen3-8b"]}):
        with pytest.raises(BadInput, match="Qwen/Qwen3-8B, unsloth/Qwen3-8B"):
            coverage(rows, **asked)  # type: ignore[arg-type]


def test_the_same_bytes_under_another_commit_are_not_stale() -> None:
    old = row(0, "org/a", revision="a" * 40, digest="1" * 64)
    for digest, standing in (("1" * 64, "ready"), ("2" * 64, "stale")):
        new = row(1, "org/a", revision="b" * 40, digest=digest)
        only_old = coverage([old, new.model_copy(update={"state": State.RETIRED})])
        assert only_old.cell("org/a", "org/Large-7B").standing == standing
