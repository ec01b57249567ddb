"""Put `benchmarks/results/apply_cpu.csv` into the docs: a picture, and the table of `docs/performance.md`.

python -m benchmarks.plot_apply
"""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.machine import RESULTS

AIMS = {"full": 0.8, "head-local": 0.6}


COLUMNS = {
    "pair": "pair",
    "support": "support",
    "dtype": "dtype",
    "tokens": "tokens",
    "milliseconds": "ms",
    "gflops": "GFLOP/s",
    "gbytes_per_second": "GB/s",
    "fraction_of_matmul": "fraction of matmul",
    "times_eager": "times eager",
    "forward_over_ours": "forward / ours",
}
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- apply_cpu: written by benchmarks.plot_apply -->", "<!-- apply_cpu: end -->"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: what the columns of `COLUMNS` say, then how the aims were met at 512 tokens and more."""
    shown = [name for name in COLUMNS if name in rows[0]]
    lines = ["| " + " | ".join(COLUMNS[name] for name in shown) + " |", "| --- " * len(shown) + "|"]
    lines += ["| " + " | ".join(row[name] for name in shown) + " |" for row in rows]
    lines.append("")
    for support, aim in AIMS.items():
        for dtype in ("float32", "bfloat16"):
            of = [
                r for r in rows if (r["support"], r["dtype"]) == (support, dtype) and int(r["tokens"]) >= 512
            ]
            found = sorted(float(r["fraction_of_matmul"]) for r in of)
            eager = sorted(float(r["times_eager"]) for r in of)
            met = sum(value >= aim for value in found)
            lines.append(
                f"- `{support}`, {dtype}: {found[0]:.2f} to {found[-1]:.2f} of the plain product, the aim of"
                f" {aim:.2f} met in {met} of {len(found)}; {eager[0]:.1f} to {eager[-1]:.1f} times eager."
            )
    if "ceiling_gflops" in rows[0]:
        tops = {r["dtype"]: r["ceiling_gflops"] for r in rows}
        copy = rows[0]["ceiling_gbytes_per_second"]
        products = ", ".join(f"{dtype} {top} GFLOP/s" for dtype, top in tops.items())
        lines.append(f"- Ceilings of the same run: {products} (2048^3), copy {copy} GB/s.")
    else:
        lines.append("- Measured before the selected layers were kept in place (`docs/kernels.md`).")
    return "\n".join(lines)


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvhub"
    from matplotlib import pyplot

    with (RESULTS / "apply_cpu.csv").open() as file:
        every = list(csv.DictReader(file))
    text = (DOCS / "performance.md").read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    (DOCS / "performance.md").write_text(f"{before}{BEGIN}\n{table(every)}\n{END}{after}")
    rows = [row for row in every if row["tokens"] == "512"]
    names = list(dict.fromkeys(row["pair"] for row in rows))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, (support, aim) in zip(axes, AIMS.items(), strict=True):
        for offset, dtype in ((-0.18, "float32"), (0.18, "bfloat16")):
            found = {
                r["pair"]: float(r["fraction_of_matmul"])
                for r in rows
                if r["support"] == support and r["dtype"] == dtype
            }
            heights = [found.get(name, 0.0) for name in names]
            axis.barh([i + offset for i in range(len(names))], heights, height=0.34, label=dtype)
        axis.axvline(aim, color="black", linewidth=0.8, linestyle="--")
        axis.set_title(f"{support} (aim {aim:.1f})", fontsize=9)
        axis.set_xlabel("fraction of the plain product, 512 tokens", fontsize=8)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.invert_yaxis()
        axis.tick_params(axis="x", labelsize=7)
    axes[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(DOCS / "apply_cpu.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
