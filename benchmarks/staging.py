"""How long a pass takes while another request's blocks come from a slow exchange; results/staging.json.

    python -m benchmarks.staging

On SGLang's real tree and pools, without a server. Each read takes `DELAY`, as on a busy
network. `inline` is what kvhub did before: look-up and reads in the scheduling pass of
the request. `staged` is what it does: the pass returns, and the blocks are read by
workers meanwhile. A pass is what stands between two decode steps of the running request;
the map itself, which is in both, is shown apart. Publishing is measured the same way.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.faults import FaultyExchange
from support.pools import LARGE, SMALL, Engine, mapper_between

from benchmarks import machine

DELAY, BLOCKS, ROUNDS = 0.02, 16, 8
PROMPT = [(i * 37 + 11) % 997 for i in range(BLOCKS * 64 + 8)]
MAPPER = mapper_between(SMALL, LARGE)


def one(root: Path, *, staged: bool, delay: float) -> dict[str, float]:
    """Milliseconds of the longest pass, of the map, and from arrival to admission."""
    exchange = FaultyExchange(root)
    target = Engine(LARGE, root, (MAPPER,), exchange=exchange, slots=4096, publish_wait_ms=50)
    exchange.delay = {"header": delay / 10, "get": delay}
    running = target.admit(target.request([1, 2, 3] * 20))
    target.decode(running, 1)
    req = target.request(PROMPT, ask={"reuse": True})
    longest, began = 0.0, time.perf_counter()
    while True:
        started = time.perf_counter()
        try:
            target.match(req, passes=1)
            waiting = False
        except AssertionError:
            waiting = True
        if waiting and not staged:  # the pass itself waits for the exchange
            while not req.kvhub_plan.stage.done:
                time.sleep(0.0005)
        longest = max(longest, time.perf_counter() - started)
        if not waiting:
            break
        target.decode(running, 1)
        time.sleep(0.002)  # a decode step of the running request
    arrived = time.perf_counter() - began
    started = time.perf_counter()
    loaded = target.admit(req)
    mapping = time.perf_counter() - started
    assert loaded.loaded == BLOCKS * 64, loaded.meta
    exchange.delay["put"] = delay
    target.decode(loaded, 1)
    started = time.perf_counter()
    target.finish(loaded)
    finishing = time.perf_counter() - started
    return {
        "longest_pass_ms": longest * 1e3,
        "until_staged_ms": arrived * 1e3,
        "load_and_prefill_ms": mapping * 1e3,
        "finish_ms": finishing * 1e3,
    }


def main() -> None:
    result: dict[str, Any] = {"machine": machine.describe(), "blocks": BLOCKS, "read_delay_ms": DELAY * 1e3}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "exchange"
        Engine(SMALL, root, slots=4096).run(PROMPT, 2)
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(ROUNDS):
            for delay in (0.0, DELAY):
                for staged in (False, True):  # side by side in every round
                    name = f"{'staged' if staged else 'inline'}, {'slow' if delay else 'quick'}"
                    found.setdefault(name, []).append(one(root, staged=staged, delay=delay))
        for name, rounds in found.items():
            result[name] = {key: machine.interval([r[key] for r in rounds]) for key in rounds[0]}
            print(name, {key: round(value["median"], 2) for key, value in result[name].items()}, flush=True)
    print(machine.write("staging", result))


if __name__ == "__main__":
    main()
