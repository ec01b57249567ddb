"""Peak memory of whole fits against the bound that each prints before it starts; results/fit_memory.json.

    python -m benchmarks.fit_memory [--only NAME...]                    the shipped pair, float32
    python -m benchmarks.fit_memory --pair SOURCE TARGET --text FILE --name fit_memory-qwen2.5-coder

Every fit is a `kvhub fit` in a process and a KVHUB_HOME of its own, one thread. The peak is the largest
resident set that the kernel saw, memory mapped from files included; the bound is what the fit printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from support.peak import peak_of_fit, peak_of_resumed

from benchmarks import machine
from benchmarks.servers import ROOT, TEXT

_NETWORKS = "--family mlp --k 2 --epochs 1 --length 256 --stride 1"
SHIPPED = {
    "ridge, both ways": "--both --recipe ridge --k 6 --sequences 40",
    "default": "--distill 3 --sequences 40",
    "default, short windows": "--distill 3 --sequences 40 --length 256",
    "ridge, k = 2": "--recipe ridge --k 2 --sequences 40 --length 256",
    "k auto": "--recipe ridge --k auto --sequences 12 --length 512 --stride 2",
    "one model at a time": "--recipe ridge --k 6 --both --low-memory --sequences 40",
    "ridge, both ways, resumed": "--both --recipe ridge --k 6 --sequences 8",
    "networks of 256, 10,240 rows": f"{_NETWORKS} --sequences 40 --hidden 256,256",
    "networks of 256, 5,120 rows": f"{_NETWORKS} --sequences 20 --hidden 256,256",
    "networks, one a layer": f"{_NETWORKS} --sequences 20 --networks layer --hidden 512,1024",
}
GIVEN = {
    "ridge": "--recipe ridge --k 8 --sequences 16 --length 512 --stride 2",
    "ridge, both ways": "--recipe ridge --k 8 --both --sequences 16 --length 512 --stride 2",
    "one model at a time": "--recipe ridge --k 8 --both --low-memory --sequences 16 --length 512 --stride 2",
    "default": "--distill 3 --k 8 --sequences 16 --length 512 --stride 2",
}


def measure(arguments: list[str], *, resumed: bool = False) -> dict[str, float | str]:
    """Bound and peak of one fit, gigabytes of 1e9 bytes; resumed: of its second start after a kill."""
    with tempfile.TemporaryDirectory() as home:
        peak = (peak_of_resumed if resumed else peak_of_fit)(arguments, Path(home), cwd=ROOT)
    return {
        "bound_gb": peak.bound,
        "largest_stage": peak.stage,
        "peak_gb": round(peak.used, 3),
        "peak_over_bound": round(peak.used / peak.bound, 3),
    }


def _recorded(name: str) -> dict[str, object]:
    """Fits that an earlier run has written."""
    path = machine.RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["fits"]) if path.exists() else {}


def main() -> None:
    """Measure, print, write after every fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", nargs=2, metavar=("SOURCE", "TARGET"))
    parser.add_argument("--text", default=str(TEXT))
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--captures")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--name", default="fit_memory")
    given = parser.parse_args()
    models = given.pair or ["models/small", "models/large"]
    dtype = given.dtype or ("bfloat16" if given.pair else "float32")
    common = [*models, "--text", given.text, "--dtype", dtype]
    if given.captures:
        common += ["--captures", given.captures]
    result: dict[str, object] = {
        "what": "peak resident set of a fit over the bound that it printed",
        "pair": [Path(model).name for model in models],
        "dtype": dtype,
        "captures_on_disk": bool(given.captures),
    }
    fits: dict[str, object] = _recorded(given.name) if given.only else {}
    for name, options in (GIVEN if given.pair else SHIPPED).items():
        if given.only and name not in given.only:
            continue
        fits[name] = {"options": options, **measure([*common, *options.split()], resumed="resumed" in name)}
        print(name, fits[name], flush=True)
        machine.write(given.name, result | {"fits": fits, "machine": machine.describe()})


if __name__ == "__main__":
    main()
