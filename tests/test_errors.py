"""docs/errors.md keeps its word: its tests exist, its messages are in the code, its codes are complete."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvhub import errors

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SOURCES = ("kvhub", "registry/kvhub_registry", "sglang_ext/kvhub_sglang")


def tables() -> list[dict[str, str]]:
    """The rows of all tables that have a `test` column, by heading."""
    rows: list[dict[str, str]] = []
    headings: list[str] = []
    for line in DOC.splitlines():
        if not line.startswith("|"):
            headings = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not headings:
            headings = cells
        elif "test" in headings and not set(line) <= set("|-"):
            assert len(cells) == len(headings), line
            rows.append(dict(zip(headings, cells, strict=True)))
    return rows


ROWS = tables()


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def texts() -> list[str]:
    """Every string in the code; what an f-string fills in is a NUL."""
    found = []
    for source in SOURCES:
        for file in (ROOT / source).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                    found.append("".join(map(str, parts)))
    return found


def test_there_are_rows() -> None:
    assert len(ROWS) > 70


@pytest.mark.parametrize("row", ROWS, ids=[row["input"] for row in ROWS])
def test_row(row: dict[str, str]) -> None:
    match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", row["test"])
    assert match is not None
    assert match[2] in functions(match[1])
    codes = {str(kind.exit_code) for kind in vars(errors).values() if isinstance(kind, type)}
    assert set(re.findall(r"\d+", row["exit"])) <= codes | {"0", "130"}
    for message in re.findall(r"`([^`]+)`", row["message"]):
        pattern = re.compile(".+?".join(re.escape(part) for part in message.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in texts()), message


def test_every_code_in_the_code_is_listed() -> None:
    used = set()
    for file in (ROOT / "kvhub").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Incompatible":
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        used.add(keyword.value.value)
    assert len(used) > 20
    assert {code for code in used if f"`{code}`" not in DOC} == set()
