"""A mapper's life by hand: promote, retire, name."""

from __future__ import annotations

import re

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import demote, directory_of, explained, find, open_registry, record_evidence
from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.evaluation.gate import reason, rejudge
from kvhub.settings import Settings
from kvhub.store import trust
from kvhub.strict_json import shown
from kvhub_registry import MapperRow, State

_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


def promote(ref: str, *, why: str, settings: Settings | None = None) -> MapperRow:
    """Make a mapper ready, also one that was retired: every byte and the gate are checked again.

    There is no way around the gate (law 4). Errors: `Corrupt`; `Incompatible` with code
    `unevaluated` or `gate`; `BadInput` for a trust policy that cannot be read, before anything is changed.
    """
    trust.load(settings)
    row = find(ref, settings)
    directory = directory_of(row.digest, settings)
    try:
        manifest = verify_artifact(directory, deep=True)
        if manifest.digest != row.digest:
            raise Corrupt(f"{directory} holds mapper {manifest.digest[:12]}, not {row.digest[:12]}")
        evidence = read_evidence(directory, manifest)
        trust.demand(directory, manifest, settings)
    except Corrupt as error:
        demote(row.digest, f"kvhub promote: {error.message}", settings)
        raise
    if evidence is None:
        raise Incompatible(
            f"mapper {row.digest[:12]} has no evidence", "kvhub eval measures it", code="unevaluated"
        )
    verdict = rejudge(evidence, manifest)
    if not verdict.passed:
        raise Incompatible(
            f"mapper {row.digest[:12]} may not serve: {reason(verdict)}",
            "kvhub info shows every score",
            code="gate",
        )
    judged = evidence.model_copy(update={"verdict": verdict})
    if record_evidence(manifest, judged, why=why, settings=settings) is State.RETIRED:
        with explained(), open_registry(settings) as registry:
            registry.set_state(row.digest, State.READY, why)
    return find(row.digest, settings)


def retire(ref: str, *, why: str, settings: Settings | None = None) -> MapperRow:
    """Take a mapper out of service; its files stay until `kvhub gc`."""
    row = find(ref, settings)
    with explained(), open_registry(settings) as registry:
        registry.set_state(row.digest, State.RETIRED, why)
    return find(row.digest, settings)


def alias_name(text: str) -> str:
    """`@prod` or `prod` as the registry keeps it. Errors: `BadInput`."""
    name = text.removeprefix("@")
    if not _ALIAS.fullmatch(name):
        raise BadInput(
            f"{shown(text, 80)!r} cannot be an alias",
            "a letter, then letters, digits, '.', '_' or '-'; at most 64",
        )
    return name


def name(text: str, ref: str, *, why: str, settings: Settings | None = None) -> tuple[MapperRow, str | None]:
    """Let an alias mean a mapper; returns the mapper and the digest that the alias meant before."""
    alias, row = alias_name(text), find(ref, settings)
    with explained(), open_registry(settings) as registry:
        before = registry.set_alias(alias, row.digest, why)
    return row, before


def unname(text: str, *, why: str, settings: Settings | None = None) -> str:
    """Forget an alias; returns the digest that it meant. Errors: `NotFound`."""
    with explained(), open_registry(settings) as registry:
        return registry.remove_alias(alias_name(text), why)
