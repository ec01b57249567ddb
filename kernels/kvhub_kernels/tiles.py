"""Tile shapes of the Triton kernels, by support and number of tokens: a shipped table.

`benchmarks/gpu_apply.py --tune` measures the candidates and prints a new one.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """`pairs` columns of each accumulator (two a program), so 2 * pairs columns in all."""

    tokens: int
    pairs: int
    depth: int
    warps: int
    stages: int
    persistent: bool = True


SMALL = Tile(16, 32, 64, 4, 4)
TABLE: dict[tuple[str, int], Tile] = {
    ("full", 16): Tile(16, 64, 128, 4, 4),
    ("full", 64): Tile(64, 64, 64, 4, 4),
    ("full", 1 << 30): Tile(128, 128, 64, 8, 3),
    ("head-local", 16): Tile(16, 64, 128, 4, 4),
    ("head-local", 64): Tile(64, 64, 64, 4, 4),
    ("head-local", 1 << 30): Tile(128, 64, 64, 8, 4),
}
"""By support and the most tokens it is meant for. Chosen from compiled resources; not measured yet."""

CANDIDATES = [
    Tile(tokens, pairs, depth, warps, stages, persistent)
    for tokens, pairs, depth, warps, stages in (
        (128, 128, 64, 8, 3),
        (128, 128, 32, 8, 4),
        (128, 64, 64, 8, 4),
        (128, 64, 64, 4, 3),
        (256, 64, 64, 8, 3),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 4),
    )
    for persistent in (True, False)
]


def choose(support: str, tokens: int, pairs: int, width: int) -> Tile:
    """The tile for `tokens` rows; never wider than what there is."""
    limit = min(most for kind, most in TABLE if kind == support and tokens <= most)
    tile = TABLE[support, limit]
    return tile._replace(pairs=min(tile.pairs, _power(pairs)), depth=min(tile.depth, _power(width)))


def _power(value: int) -> int:
    """The least power of two not below `value`, at least 16 (the smallest side of a product)."""
    return max(16, 1 << (value - 1).bit_length())
