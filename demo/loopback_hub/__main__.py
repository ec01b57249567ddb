"""`python -m demo.loopback_hub --root DIR [--port N]`: prints its URL, runs until it is stopped."""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
from pathlib import Path

from . import LoopbackHub

parser = argparse.ArgumentParser(prog="loopback_hub", description="A Hugging Face Hub on the loopback.")
parser.add_argument("--root", type=Path, help="directory of the blobs (default: a temporary one)")
parser.add_argument("--port", type=int, default=0, help="default: any free port")
arguments = parser.parse_args()

stop = threading.Event()
for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, lambda *_: stop.set())
with (
    tempfile.TemporaryDirectory(prefix="loopback-hub-") as temporary,
    LoopbackHub(arguments.root or Path(temporary)).serve(arguments.port) as hub,
):
    print(hub.url, flush=True)
    stop.wait()
