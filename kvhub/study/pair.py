"""A pair for studies: captures of calibration windows and recordings of held-out ones, all on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvhub.errors import BadInput
from kvhub.evaluation.evidence import ALL
from kvhub.evaluation.text import held_out_windows
from kvhub.fit.calibration import load_corpora, row_positions
from kvhub.fit.capture import Capture
from kvhub.fit.captures import CaptureStore
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.first import add_weighted
from kvhub.fit.ridge import Regularization
from kvhub.fit.selection import layer_scores, top_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved, solve_pair
from kvhub.fit.text import windows as cut
from kvhub.study.bundle import Bundle
from kvhub.study.measure import OTHER, AffineCandidate, ArmScores, measure
from kvhub.study.windows import tuning_windows

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

Tell = Callable[[str, int, int], None]
"""Called with (stage, done, in all)."""


@dataclass(frozen=True)
class StudyText:
    """Token windows of a study; each by the text's name."""

    fit: Mapping[str, Tensor]
    """`[n, length]`: the first of the calibration side, as `kvhub fit` without weights cuts them."""
    tuning: Mapping[str, Tensor]
    """`[n, prefix + tail]`: later ones of that side, to choose on."""
    held_out: Mapping[str, Tensor]
    """`[n, prefix + tail]`: of the other side, also of texts that are not fitted on."""
    tail: int

    @classmethod
    def cut(
        cls,
        texts: Sequence[Path],
        tokenizer: object,
        settings: FitSettings,
        *,
        windows: int,
        prefix: int,
        tail: int,
        tuning: int = 0,
        others: Sequence[Path] = (),
    ) -> StudyText:
        """windows: held-out ones over `texts`, and as many a text of `others`, which are not fitted on.

        Errors: `BadInput` for a text called `all` or `other`; those of `held_out_windows` and
        `tuning_windows`.
        """
        if taken := {ALL, OTHER}.intersection(path.stem for path in (*texts, *others)):
            raise BadInput(f"a text cannot be called {min(taken)}: rows of several are", "rename the file")
        share = -(-settings.sequences // len(texts))
        corpora = load_corpora(texts, tokenizer=tokenizer)
        fit = {c.name: cut(c.calibration, tokenizer, length=settings.length, limit=share) for c in corpora}
        left = settings.sequences
        for texts_left, name in zip(range(len(fit), 0, -1), fit, strict=True):
            fit[name] = fit[name][: -(-left // texts_left)]
            left -= len(fit[name])
        length = prefix + tail
        after = -(-share * settings.length // length) + 1
        apart = tuning_windows(texts, tokenizer, count=tuning, length=length, after=after) if tuning else {}
        held_out = held_out_windows(texts, tokenizer, count=windows, length=length)
        if others:
            each = windows // len(texts)
            held_out |= held_out_windows(others, tokenizer, count=each * len(others), length=length)
        return cls(fit, apart, held_out, tail)


class StudyPair:
    """`source -> target`, loaded, with what is on disk of them; the last moments are kept in memory."""

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        text: StudyText,
        settings: FitSettings,
        directory: Path,
        *,
        tell: Tell = lambda stage, done, total: None,
    ) -> None:
        """directory: where captures (as `kvhub fit --captures` keeps them) and recordings are."""
        self.source, self.target, self.text, self.settings = source, target, text, settings
        self.directory, self._tell = directory, tell
        self._moments: dict[tuple[object, ...], PairMoments] = {}
        for model in (source, target):
            CaptureStore(directory, model.identity).prepare()

    def reversed(self) -> StudyPair:
        """The other direction, from the same files."""
        return StudyPair(self.target, self.source, self.text, self.settings, self.directory, tell=self._tell)

    def bundle(self, *, tuning: bool = False) -> Bundle:
        """Recordings of the held-out windows, or of the tuning windows; made where they are missing."""
        domains = self.text.tuning if tuning else self.text.held_out
        if not domains:
            raise BadInput("there are no windows to measure on")
        return Bundle.build(
            self.source,
            self.target,
            domains,
            self.directory / "recordings",
            tail=self.text.tail,
            progress=lambda done, total: self._tell("record", done, total),
        )

    def side(self, model: LoadedModel) -> Side:
        """Captures of one model, from disk or by a forward that is then kept."""
        return Side.of(model, CaptureStore(self.directory, model.identity))

    def windows(self, names: Sequence[str] | None = None, share: float = 1.0) -> list[Tensor]:
        """Calibration windows of some texts (None: all), the first `share` of each."""
        chosen = [self.text.fit[name] for name in names or self.text.fit]
        return [window for windows in chosen for window in windows[: max(1, round(share * len(windows)))]]

    def mixed(self) -> list[Tensor]:
        """All calibration windows, the texts in turn: the first few are then of every text, as in a fit."""
        columns = zip_longest(*self.text.fit.values())
        return [window for column in columns for window in column if window is not None]

    def moments(
        self,
        names: Sequence[str] | None = None,
        share: float = 1.0,
        *,
        rotated: bool = False,
        stride: int | None = None,
        exact_prefix: int = 0,
        first_weight: int = 1,
    ) -> PairMoments:
        """Over `windows(names, share)`. rotated: of keys as they are cached, with RoPE in them.

        first_weight: how many times rows of the first positions count.
        """
        step = stride or self.settings.stride
        key = (tuple(names or ()), share, rotated, step, exact_prefix, first_weight)
        if key not in self._moments:
            shapes = self.source.identity.geometry, self.target.identity.geometry
            moments = PairMoments.zeros(*shapes)
            sides = self.side(self.source), self.side(self.target)
            windows = self.windows(names, share)
            for done, window in enumerate(windows, 1):
                positions = row_positions(len(window), step, exact_prefix)
                one, other = (_maybe_rotated(side.capture(window), rotated) for side in sides)
                add_weighted(moments, one, other, positions, first_weight)
                self._tell("capture", done, len(windows))
            moments.flush()
            self._moments.clear()  # one at a time: they are large
            self._moments[key] = moments
        return self._moments[key]

    def solve(
        self,
        moments: PairMoments,
        k: int | str,
        regularization: Regularization,
        *,
        settings: FitSettings | None = None,
        norms: Tensor | None = None,
    ) -> Solved:
        """Selection and ridge, as `kvhub fit` does them. norms: of `norms_for`.

        Errors: those of `solve_pair`.
        """
        shapes = self.source.identity.geometry, self.target.identity.geometry
        known = replace(settings or self.settings, k=k)  # type: ignore[arg-type]
        layers = top_layers(layer_scores(moments, *shapes), known.grid(shapes[0])[0])
        return solve_pair(moments, *shapes, layers, regularization, known, norms)

    def candidate(self, solved: Solved, *, strip: bool = True, turn: bool = True) -> AffineCandidate:
        """To be measured. strip, turn: whether RoPE is removed before the map and applied after it."""
        return AffineCandidate(
            solved.tensors, solved.layers, self.source.identity, self.target.identity, strip=strip, turn=turn
        )

    def measure(
        self,
        candidate: AffineCandidate,
        *,
        tuning: bool = False,
        exact_prefix: int = 0,
        wrong: bool = True,
    ) -> ArmScores:
        """On held-out windows, or on the tuning windows."""
        return measure(
            candidate,
            self.bundle(tuning=tuning),
            self.target,
            exact_prefix=exact_prefix,
            wrong=wrong,
            progress=lambda done, total: self._tell("measure", done, total),
        )


def _maybe_rotated(capture: Capture, rotated: bool) -> Capture:
    if not rotated:
        return capture
    return Capture([key.float() for key in capture.keys], capture.keys, capture.values)
