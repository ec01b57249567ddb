"""The same tests on SQLite and on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import postgres
from support.records import mapper_record

from kvhub_registry import HubLocation, Registry, ScoreRecord, State


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


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A SQLite file with four mappers, two of them evaluated, named and on a Hub."""
    path = tmp_path / "registry.db"
    with Registry.open(f"sqlite:///{path}") as registry:
        for seed, (source, target) in enumerate(
            [("org/a", "org/b"), ("org/b", "org/a"), ("other/A", "org/b"), ("org/a", "org/C-7B")]
        ):
            record = mapper_record(seed, source=source, target=target)
            fit = [("r2_key", "fit", 0.1), ("r2_value", "fit", 0.2)]
            registry.register(record, [score(*one) for one in fit])
            if seed % 2:
                held = [
                    ("attention_cosine", "all", 0.9),
                    ("gap_recovered", "all", 0.5),
                    ("r2_key", "all", 0.3),
                ]
                registry.add_scores(record.digest, [score(*one) for one in [*held, *fit]])
                registry.set_state(record.digest, State.READY, "passed")
                registry.set_alias(f"name-{seed}", record.digest)
                for commit in ("1" * 40, "2" * 40):
                    place = HubLocation(repo_id=f"Team/repo-{seed}", commit=commit, pushed=True)
                    registry.add_location(record.digest, place)
    return path


def score(metric: str, domain: str, value: float) -> ScoreRecord:
    return ScoreRecord(metric=metric, arm="mapped", domain=domain, value=value, low=value, high=value, n=9)
