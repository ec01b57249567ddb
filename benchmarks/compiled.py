"""What the Triton kernels need on each GPU generation, from the assembler; no GPU is used.

    python -m benchmarks.compiled [--capability 90]

Some minutes on two cores. Writes `benchmarks/results/compiled.csv`; with `--capability` it prints only.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields

from benchmarks.machine import RESULTS, write_csv
from kvhub_kernels.compiled import CAPABILITIES, Resources, compile_all

FILE = RESULTS / "compiled.csv"
HEADER = [field.name for field in fields(Resources)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, choices=CAPABILITIES)
    options = parser.parse_args()
    rows = []
    for found in compile_all((options.capability,) if options.capability else CAPABILITIES):
        rows.append(asdict(found))
        print(", ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.capability is None:
        write_csv(FILE, rows)


if __name__ == "__main__":
    main()
