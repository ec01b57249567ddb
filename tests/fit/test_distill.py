"""The distilled correction: what it computes, what it improves, and the same numbers twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny
from torch import Tensor

import kvhub.fit.distill.run
from kvhub.errors import BadInput
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.metrics import compare_logits
from kvhub.fit.calibration import CalibrationSet, calibration_set, load_corpora, row_positions
from kvhub.fit.capture import Capture, capture
from kvhub.fit.distill.correction import Correction, principal
from kvhub.fit.distill.likely import Likely
from kvhub.fit.distill.run import corrections_of, distil, folded
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.distill.through import Through, split_of
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.normalise import norm_in, norms_for
from kvhub.fit.ridge import Regularization
from kvhub.fit.selection import select_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved, solve_pair
from kvhub.fit.study import mapped_rows
from kvhub.model.load import LoadedModel, load_model

LENGTH = 48
HOW = Distill(steps=6, rate=0.006, batch=1, tail=12, places=2, checks=2)


@dataclass
class Ready:
    """A tiny pair with a ridge fitted on very little, so that there is much to improve."""

    source: LoadedModel
    target: LoadedModel
    windows: CalibrationSet
    settings: FitSettings
    solved: Solved

    def distil(self, how: Distill = HOW, **options: Any) -> Solved:
        sides = Side.of(self.source), Side.of(self.target)
        text = list(self.windows.fit), list(self.windows.tuning[:3])
        return distil(self.solved, *sides, *text, self.settings, how, **options)

    def corrections(self) -> list[tuple[Correction, Correction]]:
        sides = Side.of(self.source), Side.of(self.target)
        return corrections_of(self.solved, *sides, list(self.windows.fit), 0)

    def kl(self, solved: Solved, window: Tensor, split: int, exact: int = 0) -> float:
        """KL(native || mapped) over the 12 tokens from `split` on, by the evaluation's own means."""
        native, cache = run(self.target.model, window, keep=len(window) - split)
        whole = capture(self.source, window)
        part = Capture([k[:split] for k in whole.content_keys], [], [v[:split] for v in whole.values])
        rows = mapped_rows(solved, part, self.target).with_exact_prefix(KvRows.of(cache, split), exact)
        logits, _ = run(self.target.model, window[split : split + 12], start=split, rows=rows)
        return compare_logits(native[:12], logits, torch.zeros(12, dtype=torch.int64)).kl / 12


@pytest.fixture(scope="module", params=["full", "head-local, normalised"])
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    root: Path = tmp_path_factory.mktemp("pair")
    source = load_model(make_tiny(root / "source", layers=2), torch.float32)
    target = load_model(make_tiny(root / "target", head_dim=24, hidden=64, seed=1), torch.float32)
    corpora = load_corpora([write_text(root / "text.txt", 400)])
    windows = calibration_set(corpora, source.tokenizer, sequences=10, length=LENGTH, tuning=True)
    support, _, normalised = request.param.partition(", ")
    settings = FitSettings(
        k=1, sequences=10, length=LENGTH, stride=1, store_dtype="float32", support=support,
        normalise_keys="on" if normalised else "off",
    )  # fmt: skip
    shapes = source.identity.geometry, target.identity.geometry
    moments = PairMoments.zeros(*shapes)
    for window in windows.fit:
        positions = row_positions(LENGTH, 1, 0)
        moments.add(capture(source, window).rows(positions), capture(target, window).rows(positions))
    moments.flush()
    layers = select_layers(moments, *shapes, 1)
    norms = norms_for(Side.of(target), settings, windows.fit[0])
    solved = solve_pair(moments, *shapes, layers, Regularization(1e-3), settings, norms)
    assert solved.normalised == bool(normalised)
    yield Ready(source, target, windows, settings, solved)


def same(one: Solved, other: Solved) -> bool:
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_correction_of_nothing_changes_nothing(ready: Ready) -> None:
    shape, corrections = ready.target.identity.geometry, ready.corrections()
    tensors = folded(ready.solved, corrections, shape, ready.settings)
    for name, tensor in ready.solved.tensors.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [0, 5])
def test_the_loss_is_what_the_folded_mapper_gives(ready: Ready, exact: int) -> None:
    """A correction that is not nothing, through the training path and through the evaluation's."""
    shape, corrections = ready.target.identity.geometry, ready.corrections()
    chance = torch.Generator().manual_seed(0)
    for pair in corrections:
        for side in pair:
            for tensor in side.trained:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=chance))
    sides = Side.of(ready.source), Side.of(ready.target)
    norms = [norm_in(ready.solved.tensors, number) for number in range(len(ready.solved.layers))]
    through = Through(ready.target.model, *sides, ready.solved.layers, exact, kept=1000, norms=norms)
    window = ready.windows.tuning[0]
    moved = replace(ready.solved, tensors=folded(ready.solved, corrections, shape, ready.settings))
    with torch.no_grad():
        found = float(through.loss(corrections, window, 30, 12))
    wanted = ready.kl(moved, window, 30, exact)
    assert wanted > 0.01 and found == pytest.approx(wanted, rel=5e-3)
    assert abs(wanted - ready.kl(ready.solved, window, 30, exact)) > 1e-3


def test_it_improves_text_that_it_has_not_seen(ready: Ready) -> None:
    better = ready.distil(replace(HOW, steps=30, batch=2))
    for name, tensor in ready.solved.tensors.items():
        assert (better.tensors[name].shape, better.tensors[name].dtype) == (tensor.shape, tensor.dtype)
    windows = ready.windows.tuning[3:]  # the first three choose when to stop
    before = sum(ready.kl(ready.solved, window, 36) for window in windows)
    after = sum(ready.kl(better, window, 36) for window in windows)
    assert len(windows) > 5 and after < 0.97 * before
    training = better.training
    assert training is not None and training.before is not None and training.after is not None
    assert training.after < training.before and len(training.curve) == 30


def test_the_same_seed_and_an_interruption_give_the_same_bits(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = ready.distil(), replace(ready, settings=replace(ready.settings, seed=1)).distil()
    assert not same(whole, other)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    place = tmp_path / "training-1.safetensors"
    monkeypatch.setattr(kvhub.fit.distill.run, "_EVERY", 2)
    with pytest.raises(KeyboardInterrupt):
        ready.distil(progress=place, tell=stop)
    assert place.exists()
    seen: list[int] = []
    resumed = ready.distil(progress=place, tell=lambda done, total: seen.append(done))
    assert seen == [4, 5, 6]
    assert same(whole, resumed) and whole.training == resumed.training
    seen.clear()
    damaged = bytearray(place.read_bytes())
    damaged[-9] ^= 0x40
    (tmp_path / "damaged").write_bytes(damaged)
    restarted = ready.distil(progress=tmp_path / "damaged", tell=lambda done, total: seen.append(done))
    assert seen[0] == 0 and same(whole, restarted)
    seen.clear()
    again = ready.distil(progress=place, tell=lambda done, total: seen.append(done))
    assert seen == [6] and same(whole, again)  # stopped before the mapper was written: nothing is done twice
    place.write_bytes(b"damaged")
    assert same(whole, ready.distil(progress=place))


def test_what_makes_it_worse_is_not_kept(ready: Ready) -> None:
    wild = ready.distil(replace(HOW, rate=30.0))
    assert wild.training is not None and wild.training.after == wild.training.before
    window = ready.windows.held_out[0]
    assert ready.kl(wild, window, 36) == pytest.approx(ready.kl(ready.solved, window, 36), rel=1e-3)


def test_windows_that_are_too_short_are_refused(ready: Ready) -> None:
    short = replace(ready, settings=replace(ready.settings, exact_prefix=40))
    with pytest.raises(BadInput, match="longer windows"):
        short.distil()


def test_the_likely_tokens_bound_the_divergence_from_below() -> None:
    chance = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(5, 400, generator=chance) for _ in range(2))
    full = float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean())
    found = [float(Likely.of(p, count).divergence(q)) for count in (1, 16, 128, 400)]
    assert found == sorted(found) and found[0] < 0.9 * full
    assert found[-1] == pytest.approx(full, rel=1e-3)
    assert float(Likely.of(p, 16).divergence(p)) == pytest.approx(0, abs=1e-5)


def test_tails_begin_anywhere_from_a_quarter_on() -> None:
    splits = [split_of(512, 64, place, 4, 0) for place in range(4)]
    assert splits == [208, 288, 368, 448]
    assert split_of(512, 64, 0, 1, 0) == 448
    assert min(split_of(64, 16, place, 2, 40) for place in range(2)) > 40


def test_the_leading_directions_are_those_of_the_whole_decomposition() -> None:
    chance = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(40, 40, generator=chance)).Q
    rows = torch.randn(1, 500, 40, generator=chance) * 0.7 ** torch.arange(40) @ turn
    rows = rows - rows.mean(1, keepdim=True)
    root = principal(rows, 4)
    assert root.shape == (1, 40, 4)
    white = rows.double() @ root
    assert torch.allclose(white[0].T @ white[0] / 500, torch.eye(4, dtype=torch.float64), atol=0.02)
    exact = torch.linalg.svd(rows[0].double()).Vh[:4]
    inside = torch.linalg.svd(exact @ torch.linalg.qr(root[0]).Q).S
    assert float(inside.min()) > 0.999
