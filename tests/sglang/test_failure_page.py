"""docs/failures.md keeps its word: its tests exist, its reasons are the code's, and none is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvhub_sglang.refusal import Code

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if line.startswith("| ") and not line.startswith("| what ")
]


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_row(row: list[str]) -> None:
    _, _, reasons, test = row
    match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
    assert match is not None and match[2] in functions(match[1])
    assert set(re.findall(r"`(\w+)`", reasons)) <= set(Code) and reasons


def test_every_reason_has_a_row() -> None:
    assert len(ROWS) > 50
    named = {reason for row in ROWS for reason in re.findall(r"`(\w+)`", row[2])}
    assert set(Code) == named
