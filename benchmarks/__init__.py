"""What is measured, each as `python -m benchmarks.NAME` from the root of a checkout."""

import sys
from pathlib import Path

# Real servers, stores and pools are made by the tests' own helpers.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
