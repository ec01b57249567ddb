"""The quick list shows what the registry does, and steps aside where it does not know the database."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kvhub.cli.listed import of_row
from kvhub.hub.search import local
from kvhub_registry import Registry, State, listing
from kvhub_registry.listing import STATES, quick_list


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"source": "a"},
        {"source": "org/a", "target": "c-7b"},
        {"state": "ready"},
        {"family": "mlp"},
        {"source": "nobody"},
    ],
)
def test_it_is_the_registry_s_list(database: Path, given: dict[str, str]) -> None:
    with Registry.open(f"sqlite:///{database}") as registry:
        rows = registry.list(**given)  # type: ignore[arg-type]
    found = quick_list(database, **given)
    assert found is not None
    assert [one.digest for one in found] == [row.digest for row in rows]
    assert found == [of_row(row) for row in rows]
    for one, row in zip(found, rows, strict=True):
        assert (one.source, one.target, one.family, one.support, one.k) == (
            row.source.name,
            row.target.name,
            row.family,
            row.support,
            row.k,
        )
        assert (one.regularization, one.convention) == (row.regularization, row.regularization_convention)
        assert (one.dataset, one.tokens) == (row.calibration.dataset, row.calibration.tokens)
        assert (one.state, one.size, one.path) == (row.state.value, row.size, row.path)
        assert (one.cosine, one.gap) == (row.score("attention_cosine"), row.score("gap_recovered"))
        measured = row.score("r2_key")
        assert one.r2_key == (row.score("r2_key", domain="fit") if measured is None else measured)
        assert one.r2_value == row.score("r2_value", domain="fit") == 0.2


@pytest.mark.parametrize("text", ["", "name-1", "team/REPO-3", "C-7b", "nothing", "org/a"])
def test_a_text_is_found_where_the_registry_finds_it(database: Path, text: str) -> None:
    with Registry.open(f"sqlite:///{database}") as registry:
        rows = local(registry.list(), text)
    found = quick_list(database, text=text)
    assert found is not None
    assert [one.digest for one in found] == [row.digest for row in rows]
    assert bool(found) == (text != "nothing")


def test_many_are_read_as_few_are(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = quick_list(database)
    monkeypatch.setattr(listing, "_FEW", 0)
    assert quick_list(database) == few


def test_what_it_does_not_know_is_left_to_the_registry(database: Path, tmp_path: Path) -> None:
    assert quick_list(tmp_path / "absent.db") is None
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at" * 100)
    assert quick_list(tmp_path / "text.db") is None
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE kvhub_schema SET version_num = '9999'")
    connection.close()
    assert quick_list(database) is None
    assert not (tmp_path / "absent.db").exists()


def test_it_needs_neither_sqlmodel_nor_pydantic() -> None:
    code = "import sys, kvhub.cli.list; print({'sqlmodel', 'pydantic', 'sqlalchemy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert tuple(state.value for state in State) == STATES
