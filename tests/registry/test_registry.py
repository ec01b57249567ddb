"""`Registry` on a real database: register, find, score, promote, remove."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from support.records import mapper_record

from kvhub_registry import (
    Ambiguous,
    BadAddress,
    HubLocation,
    MapperRecord,
    NotRegistered,
    Registry,
    ScoreRecord,
    State,
)

SCORE = ScoreRecord(metric="top1", arm="mapped", domain="all", value=0.9, low=0.88, high=0.92, n=400)


def test_a_registered_mapper_reads_back_whole(registry: Registry) -> None:
    record = mapper_record()
    row = registry.register(record)
    assert MapperRecord(**{name: getattr(row, name) for name in MapperRecord.model_fields}) == record
    assert (row.state, row.state_reason) == (State.DRAFT, "not evaluated")
    assert row.created.tzinfo is not None
    assert registry.get(record.digest) == row


def test_registering_again_keeps_state_and_scores_and_moves_the_path(registry: Registry) -> None:
    record = mapper_record()
    registry.register(record)
    registry.add_scores(record.digest, [SCORE])
    registry.set_state(record.digest, State.READY, "gate passed")
    again = registry.register(record.model_copy(update={"path": "/elsewhere"}))
    assert (again.state, again.path, again.score("top1")) == (State.READY, "/elsewhere", 0.9)
    assert len(registry.list()) == 1


def test_one_model_under_two_names_is_found_by_each(registry: Registry) -> None:
    hub, local = (
        mapper_record(1, source="org/Small", target="Qwen/Qwen3-32B"),
        mapper_record(2, target="./mine"),
    )
    local = local.model_copy(update={"target": local.target.model_copy(update={"digest": hub.target.digest})})
    registry.register(hub)
    registry.register(local)
    assert [row.digest for row in registry.list(target="qwen3-32b")] == [hub.digest]
    assert [row.digest for row in registry.list(target="mine")] == [local.digest]


def test_filters(registry: Registry) -> None:
    ridge = mapper_record(1, source="Qwen/Qwen3-8B", target="Qwen/Qwen3-32B")
    mlp = mapper_record(2, source="Qwen/Qwen3-32B", target="Qwen/Qwen3-8B").model_copy(
        update={"family": "mlp"}
    )
    registry.register(ridge)
    registry.register(mlp)
    registry.set_state(mlp.digest, State.READY, "gate passed")

    def found(**filters: str) -> list[str]:
        return [row.digest for row in registry.list(**filters)]  # type: ignore[arg-type]

    assert (
        found(target="qwen3-32b")
        == found(target="QWEN/qwen3-32B")
        == found(source="Qwen3-8B")
        == [ridge.digest]
    )
    assert found(family="mlp") == found(state="ready") == [mlp.digest]
    assert found(target="other/Qwen3-32B") == found(target="qwen3") == found(family="ridg") == []
    assert len(found()) == 2


def test_references(registry: Registry) -> None:
    record = mapper_record(1, source="org/A", target="org/B")
    other = mapper_record(2, source="org/B", target="org/A")
    for item in (record, other):
        registry.register(item)
    registry.set_alias("prod", record.digest)
    for ref in (record.digest, record.digest[:6], "prod", "a->b", "org/A -> org/B", "a→b", " prod "):
        assert registry.get(ref).digest == record.digest, ref
    for ref in (record.digest[:5], "a->c", "nothing", "", "->", "%"):
        with pytest.raises(NotRegistered):
            registry.get(ref)


def test_an_ambiguous_reference_lists_the_candidates(registry: Registry) -> None:
    digests = ["abcdef" + f"{n:058x}" for n in range(3)]
    for digest in digests:
        registry.register(mapper_record().model_copy(update={"digest": digest}))
    for ref in ("abcdef", "small->large"):
        with pytest.raises(Ambiguous) as caught:
            registry.get(ref)
        assert sorted(caught.value.candidates) == digests
        assert digests[0][:12] in caught.value.hint
    assert registry.get(digests[1]).digest == digests[1]


def test_scores_are_replaced_as_a_set(registry: Registry) -> None:
    digest = registry.register(mapper_record()).digest
    registry.add_scores(digest, [SCORE, SCORE.model_copy(update={"metric": "kl", "value": 0.1})])
    registry.add_scores(digest, [SCORE.model_copy(update={"value": 0.5})])
    row = registry.get(digest)
    assert (row.score("top1"), row.score("kl"), len(row.scores)) == (0.5, None, 1)


def test_scores_that_cannot_be_stored_leave_the_old_ones(registry: Registry) -> None:
    digest = registry.register(mapper_record()).digest
    registry.add_scores(digest, [SCORE])
    with pytest.raises(Exception, match="registry"):
        registry.add_scores(digest, [SCORE, SCORE])  # the same key twice
    assert registry.get(digest).scores == (SCORE,)


def test_locations_are_noted_once(registry: Registry) -> None:
    digest = registry.register(mapper_record()).digest
    place = HubLocation(repo_id="org/m", commit="a" * 40, pushed=True)
    for location in (place, place, place.model_copy(update={"pushed": False})):
        registry.add_location(digest, location)
    assert registry.get(digest).locations == (place, place.model_copy(update={"pushed": False}))


def test_remove_takes_everything_that_belongs_to_it_and_nothing_else(registry: Registry) -> None:
    gone, kept = registry.register(mapper_record(1)), registry.register(mapper_record(2))
    for row in (gone, kept):
        registry.add_scores(row.digest, [SCORE])
        registry.add_location(row.digest, HubLocation(repo_id="o/m", commit="a" * 40, pushed=False))
    registry.set_alias("gone", gone.digest)
    assert registry.remove(gone.digest).aliases == ("gone",)
    with pytest.raises(NotRegistered):
        registry.get("gone")
    with pytest.raises(NotRegistered):
        registry.remove(gone.digest)
    assert registry.get(kept.digest).scores == (SCORE,)
    registry.remove(kept.digest)
    assert registry.list() == []
    assert counts(registry) == {}


def test_models_and_sets_still_in_use_stay(registry: Registry) -> None:
    forth, back = mapper_record(1, source="A", target="B"), mapper_record(2, source="B", target="A")
    registry.register(forth)
    registry.register(back)
    registry.remove(forth.digest)
    assert registry.get(back.digest).source.digest == forth.target.digest


def test_an_unknown_mapper_can_get_nothing(registry: Registry) -> None:
    with pytest.raises(NotRegistered):
        registry.set_state("f" * 64, State.READY, "no")
    with pytest.raises(NotRegistered):
        registry.add_scores("f" * 64, [SCORE])
    with pytest.raises(NotRegistered):
        registry.add_location("f" * 64, HubLocation(repo_id="o/m", commit="a", pushed=True))
    with pytest.raises(NotRegistered):
        registry.set_alias("x", "f" * 64)


@pytest.mark.parametrize("name", ["", "abcdef", "a->b", " padded"])
def test_an_alias_never_hides_a_digest_or_a_pair(registry: Registry, name: str) -> None:
    digest = registry.register(mapper_record()).digest
    with pytest.raises(BadAddress):
        registry.set_alias(name, digest)


def test_dates_keep_their_instant(registry: Registry) -> None:
    when = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
    record = mapper_record().model_copy(update={"created": when})
    assert registry.register(record).created == when


def counts(registry: Registry) -> dict[str, int]:
    """Rows left in any table."""
    from sqlalchemy import func, select
    from sqlmodel import SQLModel

    with registry._engine.connect() as connection:
        found = {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in SQLModel.metadata.tables.items()
        }
    return {name: count for name, count in found.items() if count}
