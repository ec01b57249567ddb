"""The curve that k and lambda were chosen by, as a picture beside the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvhub.artifact.manifest import CurvePoint, Manifest

IMAGE = "selection.png"


def plot_curve(directory: Path, manifest: Manifest) -> Path | None:
    """Write `assets/selection.png` into an artifact whose k or lambda was chosen.

    None where nothing was chosen, or matplotlib (the extra `report`) is not installed: the numbers are
    in the manifest either way.
    """
    selection = manifest.selection
    if selection is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    by_k, by_lambda = _lines(selection.curve, selection.k)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = [
        (by_k, lambda p: p.k, "source layers k", "linear", selection.k),
        (by_lambda, lambda p: p.regularization, "lambda", "log", selection.regularization),
    ]
    shown = [panel for panel in panels if len(panel[0]) > 1]
    axes = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    for axis, (points, where, name, scale, chosen) in zip(axes, shown, strict=False):
        _panel(axis, points, where, name, scale, chosen)
    figure.suptitle(f"{manifest.source.name} to {manifest.target.name}, {selection.windows} tuning windows")
    path = directory / "assets" / IMAGE
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


def _lines(curve: list[CurvePoint], k: int) -> tuple[list[CurvePoint], list[CurvePoint]]:
    """The k curve (at the first lambda), and the lambda curve (at the chosen k)."""
    first = curve[0].regularization
    return (
        sorted((p for p in curve if p.regularization == first), key=lambda p: p.k),
        sorted((p for p in curve if p.k == k), key=lambda p: p.regularization),
    )


def _panel(axis: Any, points: list[CurvePoint], where: Any, name: str, scale: str, chosen: float) -> None:
    x = [where(point) for point in points]
    axis.plot(x, [p.kl for p in points], "o-", color="#1f5fa8", label="KL(native || mapped), nat")
    axis.axvline(chosen, color="#888888", linewidth=1, linestyle=":")
    axis.set(xlabel=name, xscale=scale, ylabel="KL, nat a token")
    axis.yaxis.label.set_color("#1f5fa8")
    other = axis.twinx()
    other.plot(x, [p.attention_cosine for p in points], "s-", color="#b5541c")
    other.plot(x, [p.attention_cosine_worst for p in points], "s:", color="#b5541c")
    other.set_ylabel("attention-output cosine (dotted: worst layer)", color="#b5541c")
