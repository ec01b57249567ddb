"""Tile shapes of the Triton kernels, by GPU, support and number of tokens: a shipped table.

`benchmarks/gpu_apply.py --tune` measures the candidates for long prompts and prints their new lines.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """`pairs` columns in each of a program's two accumulators, so 2 * pairs columns in all."""

    tokens: int
    pairs: int
    depth: int
    warps: int
    stages: int
    persistent: bool = True

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that the operands in flight take."""
        return self.stages * self.depth * (self.tokens + 2 * self.pairs) * itemsize


ANY = 1 << 30
TABLE: dict[tuple[int, str, int], Tile] = {
    (80, "full", 16): Tile(16, 64, 128, 4, 3),
    (80, "full", 64): Tile(64, 32, 64, 4, 4),
    (80, "full", ANY): Tile(128, 64, 32, 8, 4),
    (80, "head-local", 16): Tile(16, 64, 128, 4, 3),
    (80, "head-local", 64): Tile(64, 32, 64, 4, 4),
    (80, "head-local", ANY): Tile(128, 64, 32, 8, 4),
    (90, "full", 16): Tile(16, 64, 128, 4, 4),
    (90, "full", 64): Tile(64, 64, 64, 4, 4),
    (90, "full", ANY): Tile(128, 128, 64, 8, 3),
    (90, "head-local", 16): Tile(16, 64, 128, 4, 4),
    (90, "head-local", 64): Tile(64, 64, 64, 4, 4),
    (90, "head-local", ANY): Tile(128, 64, 64, 8, 4),
}
"""By the least compute capability, support, and the most tokens it is meant for. Chosen from what the
compiler reports (operands in flight, next to no spill in the inner loop); not yet measured on a GPU.
"""

CANDIDATES = [
    Tile(tokens, pairs, depth, warps, stages, persistent)
    for tokens, pairs, depth, warps, stages in (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 32, 8, 5),
        (128, 64, 64, 8, 4),
        (128, 64, 64, 4, 4),
        (128, 64, 128, 8, 3),
        (256, 64, 64, 8, 3),
        (64, 128, 64, 4, 4),
    )
    for persistent in (True, False)
]
"""What tuning tries for long prompts."""


MOST_SUMS = 128 * 128
"""Of each of a program's two accumulators, as in the largest tile of the table."""


def choose(
    support: str,
    tokens: int,
    pairs: int,
    width: int,
    *,
    capability: int,
    shared: int,
    itemsize: int,
    lanes: int = 0,
) -> Tile:
    """The tile for `tokens` rows on a GPU with `shared` bytes a program; no wider than what there is.

    lanes: columns of a whole head, where keys are normalised (`lanes_of`): a tile then holds whole heads.
    """
    known = 90 if capability >= 90 else 80
    most = min(limit for least, kind, limit in TABLE if (least, kind) == (known, support) and tokens <= limit)
    tile = TABLE[known, support, most]
    tile = tile._replace(pairs=min(tile.pairs, _power(pairs)), depth=min(tile.depth, _power(width)))
    tile = tile._replace(pairs=max(tile.pairs, lanes))
    while lanes and tile.tokens * tile.pairs > MOST_SUMS and tile.tokens > 16:
        tile = tile._replace(tokens=tile.tokens // 2)
    while tile.shared(itemsize) > shared - 4096 and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.shared(itemsize) > shared - 4096 and tile.depth > 16:
        tile = tile._replace(depth=tile.depth // 2)
    return tile


def lanes_of(dim: int) -> int:
    """Pairs of a head of `dim`, up to the next power of two."""
    return 1 << max(0, (dim // 2 - 1).bit_length())


def _power(value: int) -> int:
    """The least power of two not below `value`, at least 16 (the smallest side of a product)."""
    return max(16, 1 << (value - 1).bit_length())
