"""HTML without a template engine: everything that came from elsewhere goes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); }
th { text-align: left; font-weight: 600; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } code { font-size: .9em; } a { color: inherit; } form { margin: 1rem 0; }
input { font: inherit; padding: .3rem .5rem; width: 20rem; } button { font: inherit; padding: .3rem .8rem; }
.note { color: #888; } .bar { fill: #4c78a8; } svg text { font: 11px system-ui; fill: currentColor; }
.ready { background: #4c9f7055; } .stale { background: #d9a44155; } .failing { background: #c8553d55; }
.draft { background: #8fb8de55; } .retired { background: #b0b0b055; } .missing { color: #888; }
"""


def page(title: str, *parts: str) -> str:
    """A whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="stylesheet" href="/style.css"></head>'
        f'<body><nav><a href="/">kvhub</a></nav><h1>{escape(title)}</h1>{"".join(parts)}</body></html>'
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; `numbers` are the columns set to the right."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if n in numbers else ''}>{cell}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bars(values: Sequence[float], label: str) -> str:
    """One bar a target layer, from 0 to 1, as SVG."""
    width, height, step = 12 * len(values) + 40, 110, 12
    parts = [
        f'<text x="0" y="14">1</text><text x="0" y="{height - 16}">0</text>'
        f'<text x="20" y="{height - 2}">{escape(label)}</text>'
    ]
    for layer, value in enumerate(values):
        tall = 84 * min(max(value, 0.0), 1.0)
        parts.append(
            f'<rect class="bar" x="{20 + step * layer}" y="{90 - tall:.1f}" width="9" height="{tall:.1f}">'
            f"<title>layer {layer}: {value:.3f}</title></rect>"
        )
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )
