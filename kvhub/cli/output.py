"""How commands print: data on stdout, for people or for programs; notes on stderr.

Text that came from elsewhere (names, data sets) goes through `clean`, so that a
downloaded manifest cannot steer a terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def format_option(*formats: str) -> Callable[[Command], Command]:
    """`--format`, the same everywhere."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(formats or ("table", "json", "tsv", "quiet")),
        default=(formats or ("table",))[0],
        show_default=True,
        help="Output for people, or for programs.",
    )


def clean(text: str) -> str:
    """One printable line: control and format characters replaced."""
    if text.isprintable():  # of what is replaced nothing is; a hundred times quicker
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c
        for c in text
    )


def size(count: int) -> str:
    """Bytes for people: 12.3 MB (powers of 1000)."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int) -> str:
    """A count for people: 512k."""
    for limit, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)


def number(value: float | None, digits: int = 3) -> str:
    """A score for people, `-` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def strength(value: float, convention: str) -> str:
    """Ridge strength as people write it: `1e-3` (relative), `0.01 abs`."""
    text = f"{value:g}" if value == 0 or value >= 0.01 else f"{value:.3g}"
    return text if convention == "relative-mean-diagonal" else f"{text} abs"


def instant(when: datetime) -> str:
    """ISO 8601, UTC, for programs."""
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True)
class Column:
    """One column of a table: key of the row, heading, and how important it is on a narrow terminal."""

    key: str
    heading: str
    right: bool = False
    keep: int = 0
    """0: always shown; larger: dropped earlier when the terminal is narrow."""


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, str]]) -> None:
    """A table with aligned columns.

    On a terminal, columns that do not fit are dropped by priority (a note says
    so on stderr); elsewhere everything is printed, never cut, without colour.
    """
    shown = list(columns)
    if sys.stdout.isatty():
        width = _terminal_width()
        while len(shown) > 2 and _width(shown, rows) > width:
            weakest = max(shown, key=lambda column: column.keep)
            if weakest.keep == 0:
                break
            shown.remove(weakest)
        dropped = [column.heading for column in columns if column not in shown]
        if dropped:
            click.echo(f"not shown on {width} columns: {', '.join(dropped)}", err=True)
    widths = {c.key: max([len(c.heading), *(len(row[c.key]) for row in rows)]) for c in shown}

    def line(cells: Mapping[str, str]) -> str:
        parts = [
            cells[c.key].rjust(widths[c.key]) if c.right else cells[c.key].ljust(widths[c.key]) for c in shown
        ]
        return "  ".join(parts).rstrip()

    head = line({c.key: c.heading for c in shown})
    click.echo(click.style(head, bold=True) if _styled() else head)
    if rows:
        click.echo("\n".join(line(row) for row in rows))


def tsv(keys: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Tab-separated values with a heading line; tabs and newlines in values are replaced."""
    lines = ["\t".join(keys)]
    lines += ["\t".join("" if row[key] is None else clean(str(row[key])) for key in keys) for row in rows]
    click.echo("\n".join(lines))


def finite(value: Any) -> Any:
    """The same value with null for what JSON cannot hold, NaN and infinity: registries of older versions
    have such scores, and one of them must not keep all else from being shown.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_json(value: object) -> None:
    """Indented JSON; ASCII, so nothing in it can steer a terminal."""
    click.echo(_dumps(value, indent=2))


def as_json_lines(values: Iterable[object]) -> None:
    """A JSON array with one element a line: indenting ten thousand takes longer than reading them."""
    lines = ",\n".join(_dumps(value) for value in values)
    click.echo(f"[\n{lines}\n]" if lines else "[]")


def note(text: str) -> None:
    """Something for the person watching, on stderr."""
    click.echo(clean(text), err=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr for people; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(clean(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _dumps(value: object, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=True, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, ensure_ascii=True, allow_nan=False)


def _width(columns: Sequence[Column], rows: Sequence[Mapping[str, str]]) -> int:
    return sum(max([len(c.heading), *(len(row[c.key]) for row in rows)]) + 2 for c in columns) - 2


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


def _styled() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
