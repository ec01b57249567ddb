from datetime import UTC, datetime
from typing import Any

import pytest
from support.records import digest, mapper_record
from support.tiny import make_tiny

from kvhub.errors import Incompatible, NotFound
from kvhub.model.identify import identify
from kvhub.model.identity import ModelIdentity
from kvhub.serving.select import usable
from kvhub_registry.records import MapperRow, State


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelIdentity:
    return identify(make_tiny(tmp_path_factory.mktemp("target")), dtype="float32")


def row(target: ModelIdentity, seed: int = 0, state: State = State.READY, **changed: Any) -> MapperRow:
    record = mapper_record(seed)
    facts = {"digest": target.digest, "revision": target.revision, "dtype": target.dtype, **changed}
    fitted = record.target.model_copy(update=facts)
    values = {**record.model_dump(), "target": fitted}
    return MapperRow(
        **values, state=state, state_reason="the gate says no", changed=datetime(2026, 1, 1, tzinfo=UTC)
    )


def code(rows: list[MapperRow], target: ModelIdentity) -> str:
    with pytest.raises(Incompatible) as refused:
        usable(rows, target, what="org/small")
    assert "\n" not in refused.value.message
    return refused.value.code


def test_ready_wins_over_newer_drafts_and_new_over_old(target: ModelIdentity) -> None:
    old, new, draft = row(target, 1), row(target, 2), row(target, 3, State.DRAFT)
    assert usable([old, draft, new], target, what="", allow_draft=True) == new


def test_nothing_registered(target: ModelIdentity) -> None:
    with pytest.raises(NotFound, match="no mapper from org/small"):
        usable([], target, what="org/small")


def test_another_revision_is_refused_by_name(target: ModelIdentity) -> None:
    other = row(target, digest=digest("other"), revision="commit:" + "0" * 40)
    assert code([other], target) == "revision"


def test_another_dtype_says_which_flag_to_add(target: ModelIdentity) -> None:
    other = row(target, digest=digest("other"), dtype="bfloat16")
    with pytest.raises(Incompatible) as refused:
        usable([other], target, what="org/small")
    assert refused.value.code == "dtype" and "--dtype bfloat16" in refused.value.hint


def test_another_tokenizer_is_another_model(target: ModelIdentity) -> None:
    assert code([row(target, digest=digest("other"))], target) == "identity"


def test_a_draft_needs_the_override(target: ModelIdentity) -> None:
    draft = row(target, state=State.DRAFT)
    assert code([draft], target) == "draft"
    assert usable([draft], target, what="", allow_draft=True) == draft


def test_a_retired_mapper_is_refused_even_with_the_override(target: ModelIdentity) -> None:
    with pytest.raises(Incompatible, match="retired"):
        usable([row(target, state=State.RETIRED)], target, what="", allow_draft=True)
