"""What a fit will hold in memory, by formula: the peak of each of its stages, and the largest of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvhub.fit.calibration import TAIL, TUNING
from kvhub.fit.distill.correction import RANK
from kvhub.fit.distill.schedule import SAMPLE, SAMPLE_WINDOWS, Distill
from kvhub.fit.footprint import Footprint
from kvhub.fit.memory import RUNTIME
from kvhub.fit.mlp import MlpSettings, parameters, step_floats
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.first import WEIGHT
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry
from kvhub_kernels.mlp import CHUNK

RESERVE = 1.03
"""What allocators add."""
LATER = 30_000_000
"""Bytes that libraries load and keep when a model first runs."""
PRODUCTS = 16_000_000
"""Bytes that products of many groups and small blocks between large ones take in training."""
_ADD, _SOLVE = "adds up moments", "solves"
_NOTHING = Footprint(0, 0, 0)


@dataclass(frozen=True)
class Budget:
    """Bytes, by what holds them and by when."""

    held: int
    """Python, libraries and the text: what the process has before anything is loaded."""
    models: int
    """Weights that are in memory at one time, at most."""
    moments: int
    """Float64 sums and products of all layers, K and V: 16 * F_s * (F_s + F_t), both: + 16 * F_t**2."""
    stages: dict[str, int]
    """The peak of each stage beside `held`: its models, moments, mappers and what it works with."""

    @property
    def total(self) -> int:
        """Stages come one after the other."""
        return self.held + LATER + int(RESERVE * max(self.stages.values()))

    def in_blocks(self, needed: int) -> Budget:
        """The same where some target layers are fitted at a time: `needed` bytes, and no models."""
        work = {name: size for name, size in self.stages.items() if name not in (_ADD, _SOLVE)}
        return replace(self, moments=needed, stages=work | {_SOLVE: needed})

    def __str__(self) -> str:
        stage = max(self.stages, key=self.stages.__getitem__)
        parts = (("models", self.models), ("moments", self.moments), ("this process", self.held))
        shown = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in parts)
        return f"{self.total / 1e9:.2f} GB at the peak, while it {stage} ({shown})"


def moment_bytes(source: Geometry, target: Geometry, *, both: bool) -> int:
    """Float64 moments of K and of V over all layers."""
    wide, other = source.num_layers * source.features, target.num_layers * target.features
    return 16 * (wide * (wide + other) + (other * other if both else other) + wide + other)


def budget(
    source: Geometry,
    target: Geometry,
    settings: FitSettings,
    *,
    both: bool,
    models: tuple[Footprint, Footprint] = (_NOTHING, _NOTHING),
    elsewhere: int = 0,
    itemsize: int = 4,
    windows: int = SAMPLE_WINDOWS,
    captured: tuple[bool, bool] = (False, False),
    low_memory: bool = False,
    held: int = RUNTIME,
) -> Budget:
    """The peak of a fit of `windows` windows.

    models: of source and target. elsewhere: bytes of weights that lie in no main memory. itemsize: bytes of
    a number in the models' caches. captured: of which model all captures are on disk, so that it is not run.
    low_memory: one model at a time, and none while the moments are there.
    held: bytes that the process has now.
    """
    pairs = ((source, target), (target, source))[: 1 + both]
    run = zip(models, captured, strict=True)
    bodies = [0 if done else model.weights - model.unread for model, done in run]
    running = max(0, (max if low_memory else sum)(bodies) - elsewhere)
    beside = 0 if low_memory else running
    # With logits: the embedding of a target that is in memory, or all of it.
    asked = [
        max(0, beside + (model.unread if body and not low_memory else model.weights - elsewhere))
        for model, body in zip(models, bodies, strict=True)
    ]
    moments = moment_bytes(source, target, both=both)
    mappers = sum(_mapper(*pair, settings) for pair in pairs)
    capture = max(
        _capture(shape, model, settings.longest, itemsize)
        for shape, model in zip((source, target), models, strict=True)
    )
    solve = mappers + max(_solve(*pair, settings) for pair in pairs)
    logits = max(running, asked[1], asked[0] if both else 0)
    most = running
    stages = {
        "runs the models": running + capture,
        _ADD: beside + moments + capture + _blocks(source, target, settings),
        _SOLVE: beside + moments + solve,
        "scores": beside + mappers + 2 * capture,
    }
    if settings.automatic or settings.recipe == "best":
        judged = max(
            _judging(*pair, model, settings.longest, itemsize)
            for pair, model in zip(pairs, models[::-1], strict=False)
        )
        most = logits
        stages["chooses"] = logits + moments + solve + judged
    if isinstance(settings.train, Distill):
        most = logits
        stages["takes gradient steps"] = max(
            asked[number]
            + mappers
            + capture
            + _distilling(*pair, settings, models[number], windows, itemsize)
            for pair, number in zip(pairs, (1, 0), strict=False)
        )
    if isinstance(settings.train, MlpSettings):
        rows = windows * -(-settings.longest // settings.stride)
        networks = sum(_networks(*pair, settings) for pair in pairs)
        known = beside + mappers + networks
        stages["trains networks"] = known + max(_training(*pair, settings, rows) for pair in pairs)
        stages["scores"] = known + 2 * capture + max(_applied(*pair, settings) for pair in pairs)
    return Budget(held, most, moments, stages)


def memory_needed(source: Geometry, target: Geometry, *, k: int, both: bool) -> int:
    """Bytes that a fit by closed form holds at its peak beside the models and the process itself."""
    return max(budget(source, target, FitSettings(k=k), both=both).stages.values())


def _mapper(source: Geometry, target: Geometry, settings: FitSettings) -> int:
    stored = 2 if settings.store_dtype == "bfloat16" else 4
    return stored * 2 * target.num_layers * target.features * settings.features(source)


def _capture(shape: Geometry, model: Footprint, length: int, itemsize: int) -> int:
    """One window's forward, its cache, content keys in float32, and what reading or writing copies."""
    wide = shape.num_layers * shape.features
    return length * (wide * (4 + 4 * itemsize) + 4 * model.hidden)


def _blocks(source: Geometry, target: Geometry, settings: FitSettings) -> int:
    """Rows in float64, K and V: those that wait for a block, one side of them joined, the next window's."""
    wide = source.num_layers * source.features + target.num_layers * target.features
    window = -(-(settings.longest - settings.exact_prefix) // settings.stride) + WEIGHT - 1
    waiting = -(-PairMoments.BLOCK // window) * window
    return 8 * wide * (2 * waiting + waiting + 2 * window)


def _solve(source: Geometry, target: Geometry, settings: FitSettings) -> int:
    """Two blocks for a centred Gram, the factors of K and of V; the weights in float64."""
    width = settings.features(source)
    blocks = target.num_kv_heads if settings.support == "head-local" else 1
    return 8 * (4 * blocks * width * width + 4 * width * target.features)


def _judging(source: Geometry, target: Geometry, model: Footprint, length: int, itemsize: int) -> int:
    """What is kept of every tuning window, and one candidate's cache on one of them."""
    rows, native = source.num_layers * source.features, 2 * itemsize * target.num_layers * target.features
    queries = itemsize * target.num_layers * target.num_attention_heads * target.head_dim
    each = length * (rows * (4 + itemsize) + native) + TAIL * (queries + 4 * model.vocabulary)
    return TUNING * each + 3 * length * native + 8 * 4 * TAIL * model.vocabulary


def _distilling(
    source: Geometry, target: Geometry, settings: FitSettings, model: Footprint, windows: int, itemsize: int
) -> int:
    """Every map and its directions in float32, and then the sample of rows or one tail with its gradients."""
    assert isinstance(settings.train, Distill)
    width, out, layers = settings.features(source), target.features, target.num_layers
    longest = settings.longest
    maps = 2 * layers * (width * (out + RANK) + 5 * RANK * out)
    windows = min(windows, settings.train.windows)
    chosen = len(range(0, windows, max(1, windows // SAMPLE_WINDOWS)))
    rows = chosen * -(-longest // max(1, chosen * longest // SAMPLE))
    sample = rows * (2 * (source.num_layers * source.features + layers * out) + 5 * width + 3 * out)
    tail = min(settings.train.tail, longest // 4)
    queries = target.num_attention_heads * target.head_dim
    # Of a layer: what the tail's own forward keeps, its attention, the mapped rows and what is made of them.
    kept = tail * (itemsize * model.hidden + 4 * target.num_attention_heads * longest)
    kept += longest * (8 * RANK + 16 * out + itemsize * queries)
    return 4 * maps + max(4 * sample, layers * kept + 16 * tail * model.vocabulary)


def _networks(source: Geometry, target: Geometry, settings: FitSettings) -> int:
    assert isinstance(settings.train, MlpSettings)
    stored = 2 if settings.store_dtype == "bfloat16" else 4
    return stored * 2 * target.num_layers * parameters(settings.train, *settings.networks(source, target))


def _training(source: Geometry, target: Geometry, settings: FitSettings, rows: int) -> int:
    """Rows of K and of V of one layer, a step's choice of them, and what steps hold."""
    assert isinstance(settings.train, MlpSettings)
    how, features = settings.train, settings.inputs(source) + target.features
    batch = min(how.batch, rows)
    steps = step_floats(how, *settings.networks(source, target), batch)
    return PRODUCTS + 4 * (2 * rows * features + batch * features + steps)


def _applied(source: Geometry, target: Geometry, settings: FitSettings) -> int:
    """One side's networks in float32, on the rows of a window."""
    assert isinstance(settings.train, MlpSettings)
    rows = -(-settings.longest // settings.stride)
    groups, width, out = settings.networks(source, target)
    known = parameters(settings.train, groups, width, out)
    hidden = 2 * groups * min(CHUNK, rows) * max(settings.train.hidden)
    return 4 * (known + hidden + 2 * rows * (settings.inputs(source) + target.features))
