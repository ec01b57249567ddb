"""Run the Hub's tests with other versions of the Hub client: `python tools/clients.py 1.33.0 2.4.0`.

Each version gets an environment of its own that takes everything else from this one; with xet storage and
without. The loopback Hub has no xet storage, so with it the client's way of doing without is what is tried.
Prints one line a run; exit code 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/hub", "tests/cli/test_hub.py", "tests/cli/test_family.py", "tests/cli/test_life.py")


def main() -> int:
    """Every version, with and without xet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    arguments = parser.parse_args()
    failed = False
    for version in arguments.versions:
        with tempfile.TemporaryDirectory(prefix="kvhub-client-") as name:
            python = environment(Path(name), version)
            for xet in (False, True):
                command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments.tests]
                settings = os.environ | {"KVHUB_TEST_XET": "1" if xet else "0", "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False
                )
                last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
                print(f"huggingface_hub {version}, xet {'on' if xet else 'off'}: {last}", flush=True)
                if done.returncode:
                    failed = True
                    print(done.stdout[-4000:], flush=True)
    return int(failed)


def environment(directory: Path, version: str) -> str:
    """A Python with this version of the client before everything that is installed here."""
    venv.create(directory, symlinks=True)
    site = directory / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    rest = sysconfig.get_paths()["purelib"]
    (site / "rest.pth").write_text(f"import site; site.addsitedir({rest!r})\n")
    wanted = ["--no-deps", "--target", str(site), f"huggingface_hub=={version}"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    python = str(directory / "bin" / "python")
    code = "import huggingface_hub; print(huggingface_hub.__version__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if found != version:
        raise SystemExit(f"the environment has client {found}, not {version}")
    return python


if __name__ == "__main__":
    sys.exit(main())
