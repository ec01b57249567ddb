"""A conversation that one engine began and another goes on with, through a mapper of any family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support.pools import LARGE, SMALL, Engine, mapped_rows, native_rows

from kvhub.mapper.base import Mapper

PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
HISTORY = native_rows(SMALL, PROMPT[:192], range(192))
"""What the source leaves in the exchange, and the target maps."""


@contextmanager
def switched(mapper: Mapper, root: Path) -> Iterator[torch.Tensor]:
    """The rows that `map_layer` gives, which the target's must be; at the end nothing is held by anyone."""
    source, target = Engine(SMALL, root / "exchange"), Engine(LARGE, root / "exchange", (mapper,))
    source.run(PROMPT, 4)
    prompt = [*PROMPT, 5, 6, 7]
    running = target.admit(target.request(prompt, ask={"reuse": True}))
    assert (running.meta["mapped"], running.meta["prefilled"]) == (192, 11)
    mapped = mapped_rows(mapper, HISTORY, range(192))
    yield mapped
    native = native_rows(LARGE, prompt[192:], range(192, 203))
    torch.testing.assert_close(target.row(running, 203), torch.cat((mapped, native), dim=2))
    target.decode(running, 3)
    target.finish(running)
    source.empty()
    target.empty()
