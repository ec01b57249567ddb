"""Distil a fitted mapper: the loop, its checks on tuning windows, its progress on disk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvhub.artifact.manifest import Training
from kvhub.errors import KvhubError
from kvhub.fit.distill.correction import Correction
from kvhub.fit.distill.schedule import (
    CLIP,
    SAMPLE,
    SAMPLE_WINDOWS,
    Distill,
    demand_tail,
    optimiser,
    rate_at,
    seeded,
)
from kvhub.fit.distill.through import Corrections, Through, split_of
from kvhub.fit.memory import release
from kvhub.fit.recipes.normalise import inverse, norm_in
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved
from kvhub.fit.store import checksum, write_tensors
from kvhub.model.identity import Geometry, within_bounds
from kvhub.model.placement import input_device

OBJECTIVE = "kl-through-target"
CURVE = 64
"""Points of the loss curve that a manifest keeps."""
_EVERY = 10
"""Steps between writes of the progress."""
_PARTS = ("now", "kept", "first", "second")


@dataclass
class _State:
    """Where a run is: all that the next step depends on."""

    done: int
    curve: list[float]
    checks: list[float]
    best: float
    kept: list[Tensor]
    """The trained tensors of the best check."""


def distil(
    solved: Solved,
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    tuning: Sequence[Tensor],
    settings: FitSettings,
    how: Distill,
    *,
    progress: Path | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Solved:
    """`solved` with a correction folded into its tensors; the same names, shapes and dtypes.

    windows: what was fitted on. tuning: text that was not; the best of `how.checks` looks at it, and of
    the start, is kept, so that it is never worse there than what it started from. Without any the last
    step is kept. progress: a file to go on from; the result is that of a run in one piece. It stays:
    the mapper is not written yet.
    Both sides need the captures of the first `how.windows` on disk, or models in memory.
    Errors: `BadInput` where the windows are too short; `KvhubError` where the loss is not finite.
    """
    tail = demand_tail(how, [*windows, *tuning], settings.exact_prefix)
    windows = windows[: how.windows]
    with target.live() as model:
        exact = settings.exact_prefix
        corrections = corrections_of(solved, source, target, windows, exact, input_device(model.model))
        release()  # the sample
        norms = [norm_in(solved.tensors, number) for number in range(len(solved.layers))]
        through = Through(model.model, source, target, solved.layers, exact, norms=norms)
        state = _train(corrections, through, windows, tuning, settings, how, tail, progress, tell)
    trained = _trained(corrections)
    with torch.no_grad():
        for tensor, kept in zip(trained, state.kept, strict=True):
            tensor.copy_(kept)
    tensors = folded(solved, corrections, target.identity.geometry, settings)
    gc.collect()
    return replace(solved, tensors=tensors, training=_record(state, how, tail, settings.seed))


def corrections_of(
    solved: Solved,
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    exact_prefix: int,
    device: torch.device | str = "cpu",
) -> list[tuple[Correction, Correction]]:
    """A correction of nothing for K and for V of every target layer; a sample of `windows` is read."""
    inputs, outputs = (_sample(side, windows, exact_prefix) for side in (source, target))
    found = []
    for number, layers in enumerate(solved.layers):
        norm = norm_in(solved.tensors, number)
        if norm is not None:
            outputs[0][number] = outputs[0][number] * inverse(norm)
        key, value = (
            Correction.of(
                solved.tensors[f"layers.{number}.{side}.weight"],
                solved.tensors[f"layers.{number}.{side}.bias"],
                torch.stack([inputs[kind][layer] for layer in layers], dim=1),
                outputs[kind][number],
                device=device,
            )
            for kind, side in enumerate(("k", "v"))
        )
        found.append((key, value))
    return found


def _sample(side: Side, windows: Sequence[Tensor], exact_prefix: int) -> list[list[Tensor]]:
    """Content keys and values of all layers, `[n, heads, head_dim]` each, `SAMPLE` <= n <= 2 * `SAMPLE`."""
    chosen = windows[:: max(1, len(windows) // SAMPLE_WINDOWS)]
    tokens = sum(len(window) - exact_prefix for window in chosen)
    part = slice(exact_prefix, None, max(1, tokens // SAMPLE))
    counts = [len(range(len(window))[part]) for window in chosen]
    found: list[list[Tensor]] = []
    start = 0
    for window, count in zip(chosen, counts, strict=True):
        capture = side.capture(window)
        kinds = capture.content_keys, capture.values
        # One place for all rows: pieces would be held twice when they are put together, and a float32 view
        # of a capture would keep all of it.
        found = found or [[torch.empty(sum(counts), *rows.shape[1:]) for rows in kind] for kind in kinds]
        for layers, kind in zip(found, kinds, strict=True):
            for layer, rows in zip(layers, kind, strict=True):
                layer[start : start + count] = rows[part]
        start += count
    return found


def folded(
    solved: Solved, corrections: Corrections, target: Geometry, settings: FitSettings
) -> dict[str, Tensor]:
    """The tensors of the corrected mapper, as `solve_pair` gives them."""
    dtype = getattr(torch, settings.store_dtype)
    tensors = {name: tensor for name, tensor in solved.tensors.items() if name.endswith(".norm")}
    for number, pair in enumerate(corrections):
        for side, correction in zip(("k", "v"), pair, strict=True):
            name = f"layers.{number}.{side}"
            like = solved.tensors[f"{name}.weight"]
            weight, bias = correction.finished(dtype, target.num_kv_heads, like)
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = weight.cpu(), bias.cpu()
    return tensors


def _train(
    corrections: Corrections,
    through: Through,
    windows: Sequence[Tensor],
    tuning: Sequence[Tensor],
    settings: FitSettings,
    how: Distill,
    tail: int,
    progress: Path | None,
    tell: Callable[[int, int], None],
) -> _State:
    trained = _trained(corrections)
    adam = optimiser(trained, how.rate)
    state = _restored(progress, trained, adam)
    if state is None:
        start = _check(corrections, through, tuning, tail, settings.exact_prefix)
        state = _State(0, [], [start], start, [tensor.clone() for tensor in trained])
    marks = {how.steps * part // how.checks for part in range(1, how.checks + 1)}
    for tensor in trained:
        tensor.requires_grad_(True)
    tell(state.done, how.steps)
    while state.done < how.steps:
        adam.zero_grad(set_to_none=True)
        loss = _step(corrections, through, windows, settings, how, tail, state.done)
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        for group in adam.param_groups:
            group["lr"] = rate_at(how, state.done)
        adam.step()
        state.done += 1
        state.curve.append(loss)
        if state.done in marks:
            found = _check(corrections, through, tuning, tail, settings.exact_prefix)
            state.checks.append(found)
            if not tuning or found < state.best:
                state.best, state.kept = found, [tensor.detach().clone() for tensor in trained]
        if progress is not None and (state.done % _EVERY == 0 or state.done == how.steps):
            _save(progress, state, trained, adam)
        tell(state.done, how.steps)
    for tensor in trained:
        tensor.requires_grad_(False)
    return state


def _trained(corrections: Corrections) -> list[Tensor]:
    return [tensor for pair in corrections for side in pair for tensor in side.trained]


def _step(
    corrections: Corrections,
    through: Through,
    windows: Sequence[Tensor],
    settings: FitSettings,
    how: Distill,
    tail: int,
    step: int,
) -> float:
    """Gradients of one batch, added up; its mean loss. Errors: `KvhubError`."""
    total = 0.0
    for number in range(step * how.batch, (step + 1) * how.batch):
        turn, within = divmod(number, len(windows))
        order = torch.randperm(len(windows), generator=seeded(settings.seed, turn))
        window = windows[int(order[within])]
        place = int(torch.randint(how.places, (1,), generator=seeded(settings.seed, turn, within)))
        split = split_of(len(window), tail, place, how.places, settings.exact_prefix)
        loss = through.loss(corrections, window, split, tail) / how.batch
        if not bool(torch.isfinite(loss)):
            raise KvhubError("the distillation diverged", "use a larger --lambda, or fewer --distill steps")
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _check(
    corrections: Corrections, through: Through, tuning: Sequence[Tensor], tail: int, exact: int
) -> float:
    """The objective on the tuning windows; 0 where there are none."""
    with torch.no_grad():
        losses = [
            float(through.loss(corrections, window, split_of(len(window), tail, 0, 1, exact), tail))
            for window in tuning
        ]
    return sum(losses) / len(losses) if losses else 0.0


def _record(state: _State, how: Distill, tail: int, seed: int) -> Training:
    parts = min(CURVE, how.steps)
    edges = [how.steps * part // parts for part in range(parts + 1)]
    curve = [within_bounds(sum(state.curve[a:b]) / (b - a)) for a, b in pairwise(edges)]
    judged = state.best > 0
    return Training(
        objective=OBJECTIVE,
        steps=how.steps,
        rate=how.rate,
        batch=how.batch,
        seed=seed,
        tail=tail,
        before=within_bounds(state.checks[0]) if judged else None,
        after=within_bounds(state.best) if judged else None,
        curve=curve,
    )


def _save(path: Path, state: _State, trained: Sequence[Tensor], adam: torch.optim.Adam) -> None:
    tensors: dict[str, Tensor] = {}
    for number, tensor in enumerate(trained):
        moments = adam.state[tensor]
        tensors[f"{number}.now"] = tensor.detach()
        tensors[f"{number}.kept"] = state.kept[number]
        tensors[f"{number}.first"], tensors[f"{number}.second"] = moments["exp_avg"], moments["exp_avg_sq"]
    tensors["curve"] = torch.tensor(state.curve, dtype=torch.float64)
    tensors["checks"] = torch.tensor([state.best, *state.checks], dtype=torch.float64)
    write_tensors(path, tensors, {"done": str(state.done), "checksum": checksum(tensors, str(state.done))})


def _restored(path: Path | None, trained: Sequence[Tensor], adam: torch.optim.Adam) -> _State | None:
    """What `_save` wrote, put back; None, and nothing changed, where there is nothing or it is damaged."""
    if path is None or not path.is_file():
        return None
    with suppress(SafetensorError, OSError, KeyError, RuntimeError, ValueError, TypeError):
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            about = dict(file.metadata())
        if about["checksum"] != checksum(found, about["done"]):
            return None
        done = int(about["done"])
        curve, (best, *checks) = found["curve"].tolist(), found["checks"].tolist()
        parts = [[found[f"{n}.{name}"] for name in _PARTS] for n in range(len(trained))]
        pairs = zip(parts, trained, strict=True)
        if any(part.shape != tensor.shape for row, tensor in pairs for part in row):
            return None
        for tensor, (now, _, first, second) in zip(trained, parts, strict=True):
            tensor.copy_(now)
            adam.state[tensor] = {
                "step": torch.tensor(float(done)),
                "exp_avg": first.to(tensor.device),
                "exp_avg_sq": second.to(tensor.device),
            }
        kept = [row[1].to(tensor.device) for row, tensor in zip(parts, trained, strict=True)]
        return _State(done, curve, checks, best, kept)
    return None
