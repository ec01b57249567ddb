"""Write the tables of docs/fidelity.md from `fidelity.csv`.

    python -m benchmarks.fidelity_table

Everything between `<!-- tables -->` and `<!-- end -->` is replaced; a number that was not measured is a dash.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from benchmarks.machine import RESULTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fidelity.md"
BEGIN, END = "<!-- tables -->", "<!-- end -->"
HEAD = (
    "recipe", "k", "excess NLL", "removed", "KL", "top-1", "cosine, worst layer", "gap recovered",
    "wrong document", "MB", "MFLOP a token", "seconds",
)  # fmt: skip
Line = dict[str, str]


def number(line: Line, name: str, digits: int = 3, scale: float = 1.0) -> str:
    """One number, or a dash."""
    value = line.get(name)
    return f"{float(value) * scale:.{digits}f}" if value else "–"


def between(line: Line, names: tuple[str, str, str], digits: int = 3, scale: float = 1.0) -> str:
    """A number with its interval where it has one."""
    value, low, high = (number(line, name, digits, scale) for name in names)
    return value if "–" in (low, high) else f"{value} [{low}, {high}]"


def cells(line: Line) -> list[str]:
    """Of one recipe, in the order of `HEAD`."""
    removed = between(line, ("removed", "removed_low", "removed_high"), 0, 100.0)
    plain = line["recipe"] == "paper" or removed == "–"
    return [
        f"`{line['recipe']}`",
        line["k"],
        between(line, ("excess_nll", "low", "high")),
        "–" if plain else removed.replace(" ", " % ", 1) if "[" in removed else f"{removed} %",
        number(line, "kl"),
        number(line, "top1"),
        f"{number(line, 'cosine')}, {number(line, 'cosine_worst')}",
        between(line, ("gap_recovered", "gap_low", "gap_high"), 2),
        number(line, "wrong_document"),
        number(line, "bytes", 1, 1e-6),
        number(line, "apply_flops", 1, 1e-6),
        number(line, "fit_seconds", 0),
    ]


def table(head: tuple[str, ...] | list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def section(pair: str, lines: list[Line]) -> str:
    """One direction."""
    every = [line for line in lines if line["domain"] == "all"]
    first = every[0]
    domains = [name for name in dict.fromkeys(line["domain"] for line in lines) if name != "all"]
    by = {(line["recipe"], line["domain"]): line for line in lines}
    texts = [
        [
            f"`{line['recipe']}`",
            *(number(by.get((line["recipe"], name), {}), "excess_nll") for name in domains),
        ]
        for line in every
    ]
    return "\n\n".join([
        f"### {pair.replace('->', ' → ')}",
        f"{first['windows']} held-out windows, {first['n']} positions;"
        f" native NLL {number(first, 'native_nll')}; excess of the source alone {number(first, 'source')},"
        f" of an empty cache {number(first, 'empty')}.",
        table(HEAD, [cells(line) for line in every]),
        "Excess NLL by text (`other`: texts that were not calibrated on):",
        table(["recipe", *domains], texts),
    ])  # fmt: skip


def main() -> None:
    """Rewrite the page."""
    with (RESULTS / "fidelity.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    pairs = sorted(dict.fromkeys(line["pair"] for line in lines), key=_order)
    text = "\n\n".join(section(pair, [line for line in lines if line["pair"] == pair]) for pair in pairs)
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n## Measured\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _order(pair: str) -> tuple[bool, bool, str]:
    """The real pair first, the shipped one next."""
    return (
        "Qwen" not in pair,
        set(pair.split("->")) != {"small", "large"},
        "->".join(sorted(pair.split("->"))),
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    main()
