"""Opening: created once, upgraded once, refused when newer or not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlmodel import SQLModel
from support.records import mapper_record

from kvhub_registry import Damaged, Denied, NotRegistered, Registry, TooNew
from kvhub_registry.connect import make_engine, parse, writing
from kvhub_registry.schema import HEAD, MIGRATIONS, VERSION_TABLE


def test_head_is_the_newest_migration_and_versions_are_ordinals() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == HEAD
    assert [script.revision for script in scripts.walk_revisions()][::-1] == [
        f"{n:04d}" for n in range(1, int(HEAD) + 1)
    ]


def test_the_migrations_make_exactly_the_tables_of_the_models(url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    Registry.open(url).close()
    with make_engine(parse(url)).connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, SQLModel.metadata) == []


def test_foreign_keys_cascade_in_the_database_itself(url: str) -> None:
    with Registry.open(url) as registry:
        row = registry.register(mapper_record())
    with writing(make_engine(parse(url))) as session:
        session.execute(text("DELETE FROM kvhub_mapper"))
    with make_engine(parse(url)).connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM kvhub_artifact")).scalar_one() == 0
    assert row.digest


def test_an_open_registry_opens_again_without_alembic(url: str) -> None:
    Registry.open(url).close()
    code = (
        "import sys; from kvhub_registry import Registry; Registry.open(sys.argv[1]).list();"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('alembic', 'torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_newer_database_is_refused_and_left_alone(url: str) -> None:
    Registry.open(url).close()
    with writing(make_engine(parse(url))) as session:
        session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(TooNew, match="9999") as caught:
        Registry.open(url)
    assert "upgrade" in caught.value.hint


def test_a_failing_migration_leaves_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DDL and version roll back together: the next open starts from nothing."""
    import shutil

    from kvhub_registry import schema

    broken = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, broken)
    first = broken / "versions" / "v0001_initial.py"
    first.write_text(first.read_text().replace('"kvhub_alias",', '"kvhub_model",'))
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", broken)
        with pytest.raises(Exception, match=r"already exists|registry"):
            Registry.open(url)
    assert inspect(make_engine(parse(url))).get_table_names() == []
    with Registry.open(url) as registry:
        assert registry.list() == []


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE users (id INTEGER)"))
    with pytest.raises(Damaged, match="something else"):
        Registry.open(f"sqlite:///{path}")
    assert inspect(engine).get_table_names() == ["users"]


def test_garbage_and_torn_files_are_one_line_errors(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"this is not a database" * 100)
    with pytest.raises(Damaged, match="damaged") as caught:
        Registry.open(f"sqlite:///{garbage}")
    assert "\n" not in caught.value.message

    torn = tmp_path / "torn.db"
    with Registry.open(f"sqlite:///{torn}") as registry:
        for seed in range(30):
            registry.register(mapper_record(seed))
    with make_engine(parse(f"sqlite:///{torn}")).connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    data = torn.read_bytes()
    torn.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(Damaged), Registry.open(f"sqlite:///{torn}") as registry:
        registry.list()


def test_a_path_that_cannot_hold_a_database(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Denied):
        Registry.open(f"sqlite:///{tmp_path}/file/registry.db")
    (tmp_path / "directory").mkdir()
    with pytest.raises(Denied):
        Registry.open(f"sqlite:///{tmp_path}/directory")


def test_reading_only_never_creates_and_never_writes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/r.db"
    with pytest.raises(NotRegistered):
        Registry.open(url, read_only=True)
    assert list(tmp_path.iterdir()) == []
    with Registry.open(url) as registry:
        digest = registry.register(mapper_record()).digest
        with Registry.open(url, read_only=True) as reader:
            assert reader.get(digest).digest == digest
            with pytest.raises(Denied):
                reader.remove(digest)
        assert registry.get(digest)
