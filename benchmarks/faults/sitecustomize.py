"""Makes an exchange slow or broken inside a server, on command; only for `benchmarks.soak`.

Python imports this module at start where its folder is on PYTHONPATH. An audit hook sees
each open and rename of a block's file and does what the file named by KVHUB_BENCH_FAULTS
says: {"delay": seconds, "write": errno, "read": errno}. Nothing of kvhub is replaced.
"""

import json
import os
import sys
import time

_CONTROL = os.environ.get("KVHUB_BENCH_FAULTS")


def _fault(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("open", "os.rename"):
        return
    path = arguments[0]
    if not isinstance(path, (str, os.PathLike)):
        return
    name = os.fspath(path)
    if not isinstance(name, str) or not name.endswith((".kv", ".part")):
        return
    try:
        with open(_CONTROL or "") as file:  # noqa: PTH123 - pathlib is not imported this early
            wanted = json.load(file)
    except (OSError, ValueError):
        return
    writes = event == "os.rename" or name.endswith(".part")
    time.sleep(wanted.get("delay", 0))
    number = wanted.get("write" if writes else "read")
    if number:
        raise OSError(number, os.strerror(number), name)


if _CONTROL:
    sys.addaudithook(_fault)
