"""What the soak does to the exchange and the caches while requests run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from benchmarks.servers import Server

FOLDER = Path(__file__).parent / "faults"


class Background(ABC):
    """A thread that runs `_run` while this is entered; it returns soon after `_stop` is set."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """What is done meanwhile."""


class Faults(Background):
    """Injects one fault after another, each for a while, with healthy pauses; `counts` says which."""

    def __init__(self, exchange: Path, control: Path, servers: list[Server], seed: int) -> None:
        super().__init__("faults")
        self.exchange, self.control, self.servers = exchange, control, servers
        self.counts: Counter[str] = Counter()
        self.pause = threading.Event()
        """Cleared to keep clients from starting requests."""
        self._choose = random.Random(seed)

    @property
    def environment(self) -> dict[str, str]:
        """What a server needs to obey."""
        path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "KVHUB_BENCH_FAULTS": str(self.control)}

    def _run(self) -> None:
        kinds: list[Callable[[], None]] = [
            self._corrupt, self._corrupt, self._swap, self._delete_blocks, self._delete_root,
            self._no_directory, self._slow, self._slow, self._unwritable, self._full, self._unreadable,
            self._flush, self._flush,
        ]  # fmt: skip
        while not self._stop.wait(self._choose.uniform(0.5, 2.5)):
            fault = self._choose.choice(kinds)
            self.counts[fault.__name__.removeprefix("_")] += 1
            with contextlib.suppress(OSError):  # a file that another process took away
                fault()
        self._command({})

    # ---- what is in the exchange

    def _blocks(self) -> list[Path]:
        return sorted(self.exchange.rglob("*.kv"))

    def _some(self, count: int) -> list[Path]:
        blocks = self._blocks()
        return self._choose.sample(blocks, min(count, len(blocks)))

    def _corrupt(self) -> None:
        for path in self._some(20):
            data = bytearray(path.read_bytes())
            if len(data) < 1000:  # damaged before
                continue
            how = self._choose.choice(["flip", "header", "truncate", "extend", "empty"])
            if how == "flip":
                data[self._choose.randrange(600, len(data))] ^= 1 << self._choose.randrange(8)
            elif how == "header":
                data[self._choose.randrange(400)] ^= 0xFF
            elif how == "truncate":
                del data[self._choose.randrange(len(data)) :]
            elif how == "extend":
                data += b"\0" * 100
            else:
                data.clear()
            path.write_bytes(data)

    def _swap(self) -> None:
        """Valid blocks under other blocks' names: other tokens, tenants and models."""
        paths = self._some(20)
        contents = [path.read_bytes() for path in paths]
        self._choose.shuffle(contents)
        for path, data in zip(paths, contents, strict=True):
            path.write_bytes(data)

    def _delete_blocks(self) -> None:
        for path in self._some(40):
            path.unlink()

    def _delete_root(self) -> None:
        shutil.rmtree(self.exchange)
        self._stop.wait(self._choose.uniform(0, 1))
        self.exchange.mkdir(mode=0o700, exist_ok=True)  # a server may have made it again

    def _no_directory(self) -> None:
        aside = self.exchange.with_name("aside")
        shutil.rmtree(aside, ignore_errors=True)  # left where a server made the directory again meanwhile
        self.exchange.rename(aside)
        self.exchange.write_text("not a directory")
        self._stop.wait(1)
        self.exchange.unlink()
        aside.rename(self.exchange)

    # ---- what the operating system says

    def _slow(self) -> None:
        self._for_a_while({"delay": self._choose.choice([0.01, 0.05, 0.2])})

    def _unwritable(self) -> None:
        self._for_a_while({"write": errno.EACCES})

    def _full(self) -> None:
        self._for_a_while({"write": errno.ENOSPC})

    def _unreadable(self) -> None:
        self._for_a_while({"read": errno.EIO})

    def _for_a_while(self, what: dict[str, float]) -> None:
        self._command(what)
        self._stop.wait(self._choose.uniform(0.5, 2))
        self._command({})

    def _command(self, what: dict[str, float]) -> None:
        temporary = self.control.with_suffix(".new")
        temporary.write_text(json.dumps(what))
        temporary.replace(self.control)

    # ---- the servers' own caches

    def _flush(self) -> None:
        """Refused while requests run: so new ones wait until it went through."""
        server = self._choose.choice(self.servers)
        self.pause.clear()
        try:
            for _ in range(40):
                try:
                    server.flush()
                    self.counts["flushed"] += 1
                    return
                except OSError:
                    time.sleep(0.25)
        finally:
            self.pause.set()


def resident(server: Server) -> float:
    """MiB of the scheduler process, the one that kvhub lives in."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(server.process.pid).children(recursive=True):
            if "scheduler" in " ".join([child.name(), *child.cmdline()]):
                return float(child.memory_info().rss) / 2**20
    return float("nan")


class Memory(Background):
    """Samples of `(seconds, requests done, MiB)` of each server, every two seconds."""

    def __init__(self, servers: dict[str, Server], done: Callable[[], int]) -> None:
        super().__init__("memory")
        self.servers, self.done = servers, done
        self.samples: dict[str, list[tuple[float, int, float]]] = {name: [] for name in servers}

    def _run(self) -> None:
        started = time.monotonic()
        while True:
            for name, server in self.servers.items():
                self.samples[name].append((time.monotonic() - started, self.done(), resident(server)))
            if self._stop.wait(2):
                return

    def summary(self, name: str) -> dict[str, float]:
        """First, half-way and last MiB, and the slope over the second half in MiB a 1,000 requests."""
        import numpy as np

        samples = [s for s in self.samples[name] if s[2] == s[2]]
        later = [s for s in samples if s[1] >= samples[-1][1] / 2]
        slope = float("nan")
        if len(later) > 4 and later[-1][1] > later[0][1]:
            slope = float(np.polyfit([s[1] for s in later], [s[2] for s in later], 1)[0]) * 1000
        return {
            "first": round(samples[0][2], 1),
            "half_way": round(later[0][2], 1),
            "last": round(samples[-1][2], 1),
            "slope_mib_per_1000_requests": round(slope, 2),
        }


def check_slots(server: Server) -> tuple[int, int]:
    """(slots lost, capacity) of an idle server, by SGLang's own accounting.

    Lost: capacity - free - evictable, which is what no request and no cache holds, however often one looks.
    The numbers are brought up to date by a request, whose own page they may still hold.
    """
    used = []
    for _ in range(20):
        server.generate([5, 6, 7], 1)
        load = json.loads(server.get("/v1/loads"))["loads"][0]
        if not load["num_running_reqs"] and not load["num_waiting_reqs"]:
            used.append(int(load["num_used_tokens"]))
        if used and not used[-1]:
            break
        time.sleep(0.2)
    return min(used, default=int(load["num_used_tokens"])), int(load["max_total_num_tokens"])


def alive(server: Server) -> bool:
    """Whether the main process and its scheduler live."""
    return server.process.poll() is None and os.path.exists(f"/proc/{server.process.pid}")  # noqa: PTH110
