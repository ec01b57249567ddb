"""What is read quickly of one mapper is what the registry says, and nothing where it would say another."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.records import mapper_record

from kvhub_registry import Registry, RegistryError
from kvhub_registry.quick import quick_get


def test_every_way_to_name_a_mapper(database: Path) -> None:
    digest = mapper_record(1, source="org/b", target="org/a").digest
    with Registry.open(f"sqlite:///{database}") as registry:
        forms = [row.digest for row in registry.list()]
        forms += [
            digest[:6],
            digest[:40],
            "name-1",
            "@name-1",
            " name-3 ",
            "b->a",
            "ORG/B -> org/a",
        ]
        for form in forms:
            row = registry.get(form)
            assert quick_get(database, form) == (row, registry.history(row.digest)), form
        for form in ("a->b", "ffffff", "@nobody", "nobody", "@" + digest, digest[:5], "", "->", "x" * 64):
            with pytest.raises(RegistryError):
                registry.get(form)
            assert quick_get(database, form) is None, form


def test_what_it_does_not_know_is_left_to_the_registry(database: Path, tmp_path: Path) -> None:
    digest = mapper_record(0, source="org/a", target="org/b").digest
    assert quick_get(database, digest) is not None
    assert quick_get(tmp_path / "absent.db", digest) is None and not (tmp_path / "absent.db").exists()
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at" * 100)
    assert quick_get(tmp_path / "text.db", digest) is None
    for damage in (
        "UPDATE kvhub_mapper SET created = 'yesterday'",
        "DELETE FROM kvhub_model",
        "UPDATE kvhub_schema SET version_num = '9999'",
        "DROP TABLE kvhub_schema",
    ):
        copy = tmp_path / "copy.db"
        with closing(sqlite3.connect(database)) as ours, closing(sqlite3.connect(copy)) as other:
            ours.backup(other)
            other.execute(damage)
            other.commit()
        assert quick_get(copy, digest) is None, damage


def test_it_needs_no_sqlmodel(database: Path) -> None:
    digest = mapper_record(0, source="org/a", target="org/b").digest
    script = (
        "import sys; from pathlib import Path; from kvhub_registry.quick import quick_get;"
        "assert quick_get(Path(sys.argv[1]), sys.argv[2]);"
        "assert not {'sqlmodel', 'sqlalchemy', 'alembic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(database), digest], check=True)
