"""The same tests on SQLite and on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import postgres

from kvhub_registry import Registry


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    try:
        with postgres.server() as url:
            yield url
    except postgres.Missing as missing:
        pytest.skip(f"PostgreSQL: {missing}")


def fresh_database(url: str) -> str:
    """A new, empty database on the server of `url`."""
    import psycopg

    name = "t" + uuid.uuid4().hex
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
    return url.rpartition("/")[0] + "/" + name


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/home/registry.db"
    return fresh_database(request.getfixturevalue("postgres_url"))


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with Registry.open(url) as opened:
        yield opened
