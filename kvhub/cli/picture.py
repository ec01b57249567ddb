"""The coverage of a family as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import KvhubError
from kvhub.files import write_output
from kvhub.store.coverage import Coverage, Standing, today

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: dict[Standing, str] = {
    "ready": "#4c9f70",
    "stale": "#d9a441",
    "failing": "#c8553d",
    "draft": "#8fb8de",
    "retired": "#b0b0b0",
    "missing": "#f2f2f2",
}


def matrix_picture(table: Coverage, path: Path) -> None:
    """Write the table as PNG, whole or not at all. Errors: `KvhubError`, and those of `write_output`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise KvhubError("a picture needs matplotlib", 'pip install "kvhub[report]"') from None
    side = max(1, len(table.models))
    figure = Figure(figsize=(2.2 + 1.5 * side, 1.6 + 0.8 * side), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure, table)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    write_output(path, data.getvalue())


def _draw(figure: Figure, table: Coverage) -> None:
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    names = [_plain(name) for name in table.headings()]
    now = today()
    for cell in table.cells:
        x, y = table.models.index(cell.target), table.models.index(cell.source)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[cell.standing], edgecolor="white"))
        label = str(cell.standing)
        if cell.row is not None:
            quality = cell.row.score("top1")
            label += "" if quality is None else f"\ntop-1 {quality:.2f}"
            label += f"\n{cell.row.size / 1e9:.2g} GB, {cell.age_days(now) or 0:.0f} d"
        axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, len(names)), ylim=(len(names), 0), xlabel="target", ylabel="source")
    ticks = [n + 0.5 for n in range(len(names))]
    axes.set_xticks(ticks, names, rotation=20, ha="right", fontsize=8)
    axes.set_yticks(ticks, names, fontsize=8)
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def _plain(name: str) -> str:
    """A name without mathtext."""
    return "".join(c if c.isprintable() else "?" for c in name)[:40].replace("$", r"\$")
