"""Two processes as the two tensor-parallel ranks of one server, over gloo, on pools without a server.

`run` starts both on one scenario after another; what a scenario returns on each rank
comes back as `[rank 0's, rank 1's]`. Everything in here runs on both ranks in the same order.
"""

from __future__ import annotations

import json
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = timedelta(seconds=60)

Scenario = Callable[["Rank", Path], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Rank:
    """This process: its rank, and engines of either degree."""

    def __init__(self, rank: int) -> None:
        import torch.distributed as dist

        from kvhub_sglang.tensor_parallel import GlooRanks

        self.number = rank
        self._dist = dist
        self._ranks = GlooRanks

    def ranks(self, limit: timedelta = LIMIT) -> Any:
        """A new group, as each server has."""
        return self._ranks(self._dist.new_group([0, 1], backend="gloo", timeout=limit))

    def engine(self, model: Any, root: Path, *mappers: Any, **options: Any) -> Any:
        """One rank of an engine of degree 2."""
        from support.pools import Engine

        return Engine(model, root, mappers, ranks=self.ranks(), **options)

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """True on rank 0, for what is done without tensor parallelism; then both go on."""
        yield self.number == 0
        self._dist.barrier()

    def publish_alone(self, model: Any, root: Path, tokens: list[int]) -> None:
        """A server of degree 1 serves `tokens` and publishes its blocks."""
        from support.pools import Engine

        with self.first_alone() as alone:
            if alone:
                Engine(model, root).run(tokens, 4)

    @contextmanager
    def mapping(self, number: int, error: Callable[[], Exception]) -> Iterator[None]:
        """Mapping fails on rank `number`."""
        from kvhub_sglang import place

        def broken(*args: Any) -> None:
            raise error()

        real = place._map
        if self.number == number:
            place._map = broken
        try:
            yield
        finally:
            place._map = real

    def same_moment(self) -> None:
        self._dist.barrier()


def run(root: Path, names: list[str]) -> dict[str, list[Any]]:
    """Results of `names` by rank; a scenario that raised gives `{"error": traceback}`."""
    import support.pools  # noqa: F401 - once, not in each rank

    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(rank, str(root), names), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.exitcode is None:
            process.kill()
    found = [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [by_rank.get(name) for by_rank in found] for name in names}


def _rank(rank: int, root: str, names: list[str]) -> None:
    import os

    import torch.distributed as dist

    place = Path(root)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    here, results = Rank(rank), {}
    for name in names:
        try:
            results[name] = SCENARIOS[name](here, place / name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (place / f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # a group that was broken on purpose is not worth waiting for
