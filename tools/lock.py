"""Resolve requirements/*.in to exact pins: `make lock`, or `python tools/lock.py`.

Uses nothing but pip. Pins already in dev.lock are kept where they still fit;
`--upgrade` drops them. torch, triton and the CUDA libraries that an index's build of
torch asks for stay out of dev.lock: see requirements/torch.in and sglang.in.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
HEADER = "# Made by `make lock` from {name}.in; do not edit.\n"
APART = re.compile(r"(torch|triton)$|(nvidia|cuda)-")


def named(name: str) -> list[str]:
    """The requirement lines of requirements/<name>.in."""
    lines = (FOLDER / f"{name}.in").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def resolve(constraint: Path | None) -> list[str]:
    """`Name==version` of all that dev.in needs in an empty environment, sorted by name."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    if constraint is not None:
        command += ["--constraint", str(constraint)]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command += ["--report", report.name, *named("torch"), *named("dev")]
        subprocess.run(command, check=True)
        found = [item["metadata"] for item in json.loads(Path(report.name).read_text())["install"]]
    found.sort(key=lambda meta: meta["name"].lower())
    return [f"{meta['name']}=={meta['version']}" for meta in found if not APART.match(meta["name"].lower())]


def write(name: str, lines: list[str]) -> None:
    """Write requirements/<name>.lock."""
    path = FOLDER / f"{name}.lock"
    path.write_text(HEADER.format(name=name) + "".join(f"{line}\n" for line in lines))
    print(f"{path.relative_to(FOLDER.parent)}: {len(lines)} pins")


def main() -> None:
    """Resolve and write all lock files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take newest versions, not those locked now")
    upgrade = parser.parse_args().upgrade
    lock = FOLDER / "dev.lock"
    write("dev", resolve(lock if lock.exists() and not upgrade else None))
    write("torch", named("torch"))
    write("sglang", named("sglang"))
    write("mooncake", named("mooncake"))


if __name__ == "__main__":
    main()
