"""The command line starts without the heavy libraries."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "sglang", "numpy", "sqlalchemy")


@pytest.mark.parametrize("code", ["import kvhub", "import kvhub.cli", "import kvhub.cli.serve"])
def test_nothing_heavy_is_imported(code: str) -> None:
    check = f"{code}; import sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
