"""Pictures of the card, from manifest and evidence alone; none where matplotlib is not installed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from kvhub.artifact.manifest import Manifest
from kvhub.evaluation.evidence import Evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvhub.diagnostics.record import Diagnostics

LAYERS = "r2_by_layer.png"
CURVE = "choice_of_k.png"
SELECTION = "selection.png"
"""The same choice as a fit draws it, beside the mapper: left out where there is `CURVE`."""
LIMIT = 4096
"""Cells of a heat map; a larger one would not be read."""


DIAGNOSED = ("r2_maps.png", "r2_by_k.png")
"""Pictures of `kvhub.report` that go with the card, where `kvhub diagnose` has measured them."""


def figures(
    manifest: Manifest, evidence: Evidence | None, diagnostics: Diagnostics | None = None
) -> dict[str, bytes]:
    """PNG files by name: R2 of keys and values (and the cosine of each head) by target layer; scores by k.

    With diagnostics also R2 of each source layer for each target layer, and R2 by k.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    made: dict[str, bytes] = {}
    for name, draw in ((LAYERS, _layers), (CURVE, _curve)):
        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasAgg(figure)
        if draw(figure, manifest, evidence):
            data = io.BytesIO()
            # No date and no version inside: the same mapper gives the same bytes, and a push no commit.
            figure.savefig(data, format="png", dpi=110, metadata={"Software": None})
            made[name] = data.getvalue()
    if diagnostics is not None:
        from kvhub.report.pictures import pictures

        drawn = pictures(manifest, evidence, diagnostics)
        made |= {name: drawn[name] for name in DIAGNOSED if name in drawn}
    return made


def title(name: str) -> str:
    """What a picture shows, for those who do not see it."""
    from kvhub.report.pictures import TITLES

    chosen = "How k and lambda were chosen"
    ours = {LAYERS: "R2 and attention-output cosine by target layer", CURVE: chosen, SELECTION: chosen}
    return ours.get(name) or TITLES.get(name) or name


def _layers(figure: Figure, manifest: Manifest, evidence: Evidence | None) -> bool:
    layers = evidence.layers if evidence is not None else []
    if layers:
        r2 = [[layer.r2_key for layer in layers], [layer.r2_value for layer in layers]]
        heads = [list(column) for column in zip(*(layer.attention_cosine for layer in layers), strict=False)]
    else:
        r2, heads = [manifest.fit_scores.r2_key, manifest.fit_scores.r2_value], []
    if len(r2[0]) < 2 or len(r2[0]) != len(r2[1]) or len(r2[0]) * max(1, len(heads)) > LIMIT:
        return False
    rows = [("R2 on held-out text" if layers else "R2 of the fit", r2, ["keys", "values"])]
    if heads:
        rows.append(("attention-output cosine by query head", heads, [str(n) for n in range(len(heads))]))
    all_axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[1, 2][: len(rows)])
    for (title, values, names), (axes,) in zip(rows, all_axes, strict=True):
        image = axes.imshow(values, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axes.set(title=title, xlabel="target layer")
        if len(names) <= 2:
            axes.set_yticks(range(len(names)), names)
        figure.colorbar(image, ax=axes)
    return True


def _curve(figure: Figure, manifest: Manifest, _evidence: Evidence | None) -> bool:
    selection = manifest.selection
    if selection is None or len({point.k for point in selection.curve}) < 2:
        return False
    left, right = figure.subplots(1, 2)
    for strength in sorted({point.regularization for point in selection.curve}):
        points = sorted((p for p in selection.curve if p.regularization == strength), key=lambda p: p.k)
        ks = [point.k for point in points]
        left.plot(ks, [point.attention_cosine for point in points], marker="o", label=f"lambda {strength:g}")
        right.plot(ks, [point.kl for point in points], marker="o", label=f"lambda {strength:g}")
    for axes, title in ((left, "attention-output cosine"), (right, "KL(native || mapped), nat")):
        axes.axvline(manifest.k, color="grey", linewidth=1, linestyle=":")
        axes.set(title=f"{title}, on tuning text", xlabel="k (source layers per target layer)")
    left.legend()
    return True
