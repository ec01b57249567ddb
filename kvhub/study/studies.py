"""The studies: each varies one thing and measures every variant on the same held-out windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvhub.errors import KvhubError
from kvhub.evaluation.inject import KvRows
from kvhub.fit.ridge import PAPER, Regularization
from kvhub.fit.settings import GRID_LAMBDA
from kvhub.fit.solve import Solved
from kvhub.study.measure import AffineCandidate, ArmScores, measure
from kvhub.study.pair import StudyPair
from kvhub.study.rows import Row, rows_of

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the calibration windows, in `sequences`."""
TURNS = 10
"""Hops there and back in `composition`."""


def name_of(pair: StudyPair) -> str:
    """How rows name the pair."""
    return f"{pair.source.identity.name}->{pair.target.identity.name}"


def study_k(pair: StudyPair) -> Iterator[Row]:
    """Every k of the grid that the rows determine, with the settings' lambda."""
    moments = pair.moments()
    shape = pair.source.identity.geometry
    for k in replace(pair.settings, k="auto").grid(shape):
        if pair.settings.width(shape, k) < moments.key.n:
            yield from _ridge(pair, "k", f"k={k}", k, _strength(pair))


def study_lambda(pair: StudyPair) -> Iterator[Row]:
    """The paper's lambda and the relative grid, with the settings' k."""
    pair.moments()
    for strength in (PAPER, *(Regularization(value) for value in GRID_LAMBDA)):
        label = "paper" if strength == PAPER else f"r={strength.value:g}"
        yield from _ridge(pair, "lambda", label, pair.settings.k, strength)


def study_sequences(pair: StudyPair) -> Iterator[Row]:
    """An eighth, a quarter, half and all of the calibration windows."""
    for share in SHARES:
        solved = _solved(pair, share=share)
        if solved is not None:
            count = len(pair.windows(share=share))
            yield from _rows(pair, "sequences", f"n={count}", pair.measure(pair.candidate(solved)))


def study_domain(pair: StudyPair) -> Iterator[Row]:
    """Fitted on each text alone and on all, judged on every text."""
    names = list(pair.text.fit)
    for chosen in ([name] for name in names) if len(names) > 1 else ():
        solved = _solved(pair, names=chosen)
        if solved is not None:
            scores = pair.measure(pair.candidate(solved))
            yield from _rows(pair, "domain", f"fit={chosen[0]}", scores, domains=True)
    solved = _solved(pair)
    assert solved is not None
    yield from _rows(pair, "domain", "fit=all", pair.measure(pair.candidate(solved)), domains=True)


def study_direction(pair: StudyPair) -> Iterator[Row]:
    """There and back, with one k and lambda."""
    for way in (pair, pair.reversed()):
        way.moments()
        yield from _ridge(way, "direction", name_of(way), way.settings.k, _strength(way))


def study_rope(pair: StudyPair) -> Iterator[Row]:
    """Content keys; rotated keys in fit and use; content keys that are not rotated again in use.

    The two ablations of arXiv 2608.03893, section 4.
    """
    k, strength = pair.settings.k, _strength(pair)
    solved = pair.solve(pair.moments(), k, strength)
    for label, strip, turn in (("content", True, True), ("not re-rotated", True, False)):
        scores = pair.measure(pair.candidate(solved, strip=strip, turn=turn))
        yield from _rows(pair, "rope", label, scores)
    coupled = pair.solve(pair.moments(rotated=True), k, strength)
    scores = pair.measure(pair.candidate(coupled, strip=False, turn=False))
    yield from _rows(pair, "rope", "coupled", scores)


def study_composition(pair: StudyPair) -> Iterator[Row]:
    """A cache sent there and back: ten hops, judged after each by the model that holds it.

    The whole cache is mapped at every hop, which serving does not do (`max_hops`).
    """
    back = pair.reversed()
    ways = []
    for way in (pair, back):
        solved = way.solve(way.moments(), way.settings.k, _strength(way))
        ways.append(way.candidate(solved))
    recorded = pair.bundle()
    for hops in range(1, TURNS + 1):
        last = (pair if hops % 2 else back).target
        chain = _Chain([ways[hop % 2] for hop in range(hops)])
        # The cache starts at the source; after an even number of hops that is where it is judged.
        bundle = replace(recorded, target=last.identity)
        yield from _rows(pair, "composition", f"hops={hops}", measure(chain, bundle, last))


class _Chain:
    """Candidates one after the other."""

    def __init__(self, steps: list[AffineCandidate]) -> None:
        self._steps = steps

    def map(self, rows: KvRows, start: int = 0) -> KvRows:
        """See `Candidate.map`."""
        for step in self._steps:
            rows = step.map(rows, start)
        return rows


def _strength(pair: StudyPair) -> Regularization:
    strength = pair.settings.regularization
    return Regularization() if strength == "auto" else strength


def _rows(
    pair: StudyPair, study: str, variant: str, scores: ArmScores, *, domains: bool = False
) -> list[Row]:
    return rows_of(name_of(pair), study, variant, scores, list(pair.text.fit), domains=domains)


def _solved(pair: StudyPair, *, names: list[str] | None = None, share: float = 1.0) -> Solved | None:
    """None where the windows give too few rows."""
    try:
        return pair.solve(pair.moments(names, share), pair.settings.k, _strength(pair))
    except KvhubError:
        return None


def _ridge(pair: StudyPair, study: str, label: str, k: int | str, strength: Regularization) -> Iterator[Row]:
    try:
        solved = pair.solve(pair.moments(), k, strength)
    except KvhubError:  # not positive definite: this variant does not exist
        return
    yield from _rows(pair, study, label, pair.measure(pair.candidate(solved)))


STUDIES: dict[str, Callable[[StudyPair], Iterator[Row]]] = {
    "k": study_k,
    "lambda": study_lambda,
    "rope": study_rope,
    "sequences": study_sequences,
    "domain": study_domain,
    "direction": study_direction,
    "composition": study_composition,
}
