"""The pictures of a report, as PNG bytes; none where matplotlib is not installed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvhub.artifact.manifest import Manifest
from kvhub.diagnostics.record import Diagnostics
from kvhub.evaluation.evidence import Evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 1 << 16
"""Of a heat map; a larger one would not be read."""
KEY, VALUE, OTHER = "#1f5fa8", "#b5541c", "#3f7d4e"

Draw = Callable[["Figure", Manifest, "Evidence | None", "Diagnostics | None"], bool]


def pictures(
    manifest: Manifest, evidence: Evidence | None, diagnostics: Diagnostics | None
) -> dict[str, bytes]:
    """PNG files by name, in the order of the page; the same input gives the same bytes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    made: dict[str, bytes] = {}
    for name, size, draw in _ALL:
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        if draw(figure, manifest, evidence, diagnostics):
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=110, metadata={"Software": None})
            made[name] = data.getvalue()
    return made


def _heat(
    axes: Any, values: Sequence[Sequence[float]], title: str, low: float | None, high: float | None
) -> None:
    shown = axes.imshow(values, aspect="auto", vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.figure.colorbar(shown, ax=axes)


def _fits(values: Sequence[Sequence[float]]) -> bool:
    """Whether a heat map can show them: rows of one length, not empty and not too many."""
    return len({len(row) for row in values}) == 1 and 0 < len(values) * len(values[0]) <= CELLS


def _by_head(layers: Sequence[Sequence[float]]) -> list[list[float]]:
    """`[heads][layers]` of what `_fits`."""
    return [list(column) for column in zip(*layers, strict=True)]


def _maps(figure: Figure, _m: Manifest, _e: Evidence | None, found: Diagnostics | None) -> bool:
    if found is None or found.maps is None:
        return False
    sides = (
        ("content keys", found.maps.content_key),
        ("values", found.maps.value),
        ("raw keys", found.maps.raw_key),
    )
    if not _fits(found.maps.value):
        return False
    for axes, (name, values) in zip(figure.subplots(1, 3), sides, strict=True):
        _heat(axes, values, f"R2 of {name}", 0, 1)
        axes.set(xlabel="source layer", ylabel="target layer")
    return True


def _k(figure: Figure, manifest: Manifest, _e: Evidence | None, found: Diagnostics | None) -> bool:
    if found is None or len(found.by_k) < 2:
        return False
    axes = figure.subplots()
    ks = [point.k for point in found.by_k]
    axes.plot(ks, [point.r2_key for point in found.by_k], "o-", color=KEY, label="content keys")
    axes.plot(ks, [point.r2_value for point in found.by_k], "s-", color=VALUE, label="values")
    axes.axvline(manifest.k, color="#888888", linewidth=1, linestyle=":")
    axes.set(xlabel="source layers k (dotted: this mapper's)", ylabel="held-out R2, mean over layers")
    axes.legend()
    return True


def _cosine(figure: Figure, _m: Manifest, evidence: Evidence | None, found: Diagnostics | None) -> bool:
    layers = [
        layer.attention_cosine for layer in (found.layers if found else evidence.layers if evidence else [])
    ]
    if not _fits(layers):
        return False
    axes = figure.subplots()
    _heat(axes, _by_head(layers), "attention-output cosine", min(0.5, min(map(min, layers))), 1)
    axes.set(xlabel="target layer", ylabel="query head")
    return True


def _concentration(figure: Figure, _m: Manifest, _e: Evidence | None, found: Diagnostics | None) -> bool:
    if found is None:
        return False
    sides = [
        ("K error concentration", [layer.key_concentration for layer in found.layers]),
        ("V error concentration", [layer.value_concentration for layer in found.layers]),
    ]
    if not all(_fits(layers) for _, layers in sides):
        return False
    for axes, (title, layers) in zip(figure.subplots(1, 2), sides, strict=True):
        _heat(axes, _by_head(layers), title, 0, None)
        axes.set(xlabel="target layer", ylabel="query head")
    return True


def _layers(figure: Figure, manifest: Manifest, evidence: Evidence | None, found: Diagnostics | None) -> bool:
    left, right = figure.subplots(1, 2)
    if found is not None:
        key, value = (
            [1 - getattr(one, side) for one in found.layers] for side in ("key_error", "value_error")
        )
        left.set_title("R2 on held-out text (within windows)", fontsize=10)
        pushed = [one.residual_error for one in found.layers]
        right.semilogy(range(len(pushed)), [max(one, 1e-9) for one in pushed], "o-", color=OTHER)
        right.set_title("error pushed into the residual stream, share", fontsize=10)
        right.set_xlabel("target layer")
    else:
        key, value = manifest.fit_scores.r2_key, manifest.fit_scores.r2_value
        left.set_title("R2 of the fit on held-out calibration windows", fontsize=10)
        right.set_axis_off()
    if evidence is None and found is None and len(key) < 2:
        return False
    left.plot(range(len(key)), key, "o-", color=KEY, label="content keys")
    left.plot(range(len(value)), value, "s-", color=VALUE, label="values")
    low = min((*key, *value), default=0.0)
    left.set(xlabel="target layer", ylim=(max(min(low, 0.0), -1.0) - 0.02, 1.02))
    left.legend()
    return True


def _positions(figure: Figure, _m: Manifest, _e: Evidence | None, found: Diagnostics | None) -> bool:
    if found is None or not found.positions:
        return False
    for axes, side in zip(figure.subplots(1, 2, sharey=True), ("key", "value"), strict=True):
        for number, profile in enumerate(found.positions[:8]):
            errors = getattr(profile, side)
            at = range(1, len(errors) + 1)  # a logarithmic axis has no 0
            axes.loglog(
                at, [max(one, 1e-9) for one in errors], color=f"C{number}", label=_plain(profile.domain)
            )
        axes.set_title(f"{side} error by position, share of the layer's spread", fontsize=10)
        axes.set_xlabel("position + 1")
    axes.legend(fontsize=8)
    return True


def _choice(figure: Figure, manifest: Manifest, _e: Evidence | None, _d: Diagnostics | None) -> bool:
    if manifest.selection is None or len(manifest.selection.curve) < 2:
        return False
    left, right = figure.subplots(1, 2)
    for strength in sorted({point.regularization for point in manifest.selection.curve}):
        points = sorted(
            (p for p in manifest.selection.curve if p.regularization == strength), key=lambda p: p.k
        )
        ks = [point.k for point in points]
        left.plot(ks, [point.attention_cosine for point in points], "o-", label=f"lambda {strength:g}")
        right.plot(ks, [point.kl for point in points], "o-", label=f"lambda {strength:g}")
    left.set(xlabel="k", ylabel="attention-output cosine on tuning text")
    right.set(xlabel="k", ylabel="KL(native || mapped), nat a token")
    left.legend(fontsize=8)
    return True


def _plain(text: str) -> str:
    """Without what matplotlib would read as mathematics."""
    return text.replace("$", r"\$")[:40]


_ALL: tuple[tuple[str, tuple[float, float], Draw], ...] = (
    ("attention_cosine.png", (9, 3.6), _cosine),
    ("error_concentration.png", (11, 3.6), _concentration),
    ("layers.png", (11, 3.6), _layers),
    ("positions.png", (11, 3.6), _positions),
    ("r2_maps.png", (12, 3.6), _maps),
    ("r2_by_k.png", (6, 3.6), _k),
    ("choice.png", (11, 3.6), _choice),
)
TITLES = {
    "attention_cosine.png": "Attention-output cosine by layer and head",
    "error_concentration.png": "Does attention look where the error is? Above 1: more than elsewhere",
    "layers.png": "By target layer",
    "positions.png": "By position: the sink and the first tokens",
    "r2_maps.png": "What each source layer says of each target layer",
    "r2_by_k.png": "What further source layers add",
    "choice.png": "How k and lambda were chosen",
}
