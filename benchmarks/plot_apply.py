"""Draw `benchmarks/results/apply_cpu.csv` as `docs/apply_cpu.svg`: fraction of the plain product, by pair.

python -m benchmarks.plot_apply
"""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.machine import RESULTS

AIMS = {"full": 0.8, "head-local": 0.6}


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvhub"
    from matplotlib import pyplot

    with (RESULTS / "apply_cpu.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["tokens"] == "512"]
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
    figure.savefig(Path(__file__).parents[1] / "docs" / "apply_cpu.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
