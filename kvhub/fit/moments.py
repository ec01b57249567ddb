"""Streaming moments of source and target rows: one pass, then every fit is a sub-block solve.

Everything is accumulated in float64: in float32 the centred Gram of values
becomes indefinite (the products of large means cancel) and the fit loses a
quarter of its held-out R2.

The products are taken band by band, always the same bands in the same order of
rows. Whether one process takes them all or several share them, the sums are
equal bit for bit, because no two processes ever add to one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvhub.model.identity import Geometry


class Band(NamedTuple):
    """Rows `start:stop` of one matrix of products; of a symmetric one the part right of `start`."""

    matrix: str
    """`xx`, `xy` or `yy`."""
    start: int
    stop: int
    cost: int
    """Products for each row of text."""

    def of(self, moments: Moments) -> Tensor:
        """The view of `moments` that this band is."""
        whole: Tensor = getattr(moments, self.matrix)
        return whole[self.start : self.stop, 0 if self.matrix == "xy" else self.start :]


@dataclass
class Moments:
    """Raw sums over rows x `[F_s]` (all source layers) and y `[F_t]` (all target layers).

    n rows; x, y: sums; xx `[F_s, F_s]`, xy `[F_s, F_t]`: sums of products;
    yy: `[F_t, F_t]` where both directions are fitted, else its diagonal `[F_t]`.
    """

    n: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    mine: frozenset[Band] | None = None
    """The bands that this process adds to; None: all."""

    @classmethod
    def zeros(
        cls, source: int, target: int, *, both: bool = False, device: torch.device | str = "cpu"
    ) -> Self:
        """Empty moments for `source` and `target` features."""

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        yy = empty(target, target) if both else empty(target)
        return cls(0, empty(source), empty(target), empty(source, source), empty(source, target), yy)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows: x `[rows, F_s]`, y `[rows, F_t]`, float64. Call `symmetrize` before reading."""
        self.n += len(x)
        self.x += x.sum(0)
        self.y += y.sum(0)
        if self.yy.dim() == 1:
            self.yy += y.square().sum(0)
        for band in self.bands():
            if self.mine is None or band in self.mine:
                left = (y if band.matrix == "yy" else x)[:, band.start : band.stop]
                right = y if band.matrix == "xy" else (x if band.matrix == "xx" else y)[:, band.start :]
                band.of(self).addmm_(left.T, right)

    def bands(self) -> Iterator[Band]:
        """What is added to, in parts: eight for each matrix (of a square 9/16 are computed)."""
        wide, other = self.xy.shape
        for start, stop in _bands(wide):
            yield Band("xx", start, stop, (stop - start) * (wide - start))
            yield Band("xy", start, stop, (stop - start) * other)
        if self.yy.dim() == 2:
            for start, stop in _bands(other):
                yield Band("yy", start, stop, (stop - start) * (other - start))

    def symmetrize(self) -> None:
        """Make the Grams whole again after `add`, which leaves their lower triangles stale."""
        for gram in (self.xx, self.yy):
            if gram.dim() == 2:
                for start, stop in _bands(len(gram)):
                    gram[stop:, start:stop] = gram[start:stop, stop:].T

    def merge(self, other: Moments) -> None:
        """Add the moments of other rows of the same pair; what an all-reduce over workers does."""
        self.n += other.n
        for name in ("x", "y", "xx", "xy", "yy"):
            getattr(self, name).add_(getattr(other, name))

    def reversed(self) -> Moments:
        """The same rows with source and target exchanged: views, nothing is copied. Needs the full `yy`."""
        if self.yy.dim() != 2:
            raise ValueError("moments of one direction cannot be reversed")
        return Moments(self.n, self.y, self.x, self.yy, self.xy.T, self.xx)

    def centred_xx(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Sub-block of the centred Gram, for index tensors that broadcast (`[..., a, 1]`, `[..., 1, b]`)."""
        return _less(self.xx[rows, columns], self.x[rows], self.x[columns], self.n)

    def centred_xy(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Sub-block of the centred cross-moments, indexed like `centred_xx`."""
        return _less(self.xy[rows, columns], self.x[rows], self.y[columns], self.n)

    def raw_yy(self) -> Tensor:
        """Sum of squares of every target feature, `[F_t]`."""
        return self.yy.diagonal() if self.yy.dim() == 2 else self.yy

    def centred_yy(self) -> Tensor:
        """Sum of squares of every target feature about its mean, `[F_t]`."""
        return self.raw_yy() - self.y.square() / self.n

    def mean_x(self, rows: Tensor) -> Tensor:
        return self.x[rows] / self.n

    def mean_y(self, columns: Tensor) -> Tensor:
        return self.y[columns] / self.n


def _less(products: Tensor, left: Tensor, right: Tensor, n: int) -> Tensor:
    """`products - left * right / n`, with no more than two blocks in memory."""
    return products.sub_((left * right).div_(n))


def _bands(size: int) -> list[tuple[int, int]]:
    step = max(256, -(-size // 8))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


@dataclass
class PairMoments:
    """Moments of content keys and of values for one pair of models."""

    key: Moments
    value: Moments
    _waiting: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]

    BLOCK = 1024
    """Rows that are multiplied at once: a window alone would leave the products bound by memory."""

    @classmethod
    def zeros(
        cls, source: Geometry, target: Geometry, *, both: bool = False, device: torch.device | str = "cpu"
    ) -> Self:
        """Empty moments over all layers of both models."""
        features = source.num_layers * source.features, target.num_layers * target.features
        return cls(
            Moments.zeros(*features, both=both, device=device),
            Moments.zeros(*features, both=both, device=device),
            [],
        )

    def add(self, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Add the (content keys, values) rows of one window, as `Capture.rows` gives them."""
        self._waiting.append((source, target))
        if sum(len(rows[0][0]) for rows in self._waiting) >= self.BLOCK:
            self.fold()

    def flush(self) -> None:
        """Fold waiting rows in and make the Grams whole; called before the moments are read."""
        self.fold()
        self.key.symmetrize()
        self.value.symmetrize()

    def fold(self) -> None:
        """Add the rows that wait for a full block."""
        if self._waiting:
            for kind, moments in enumerate((self.key, self.value)):
                x = torch.cat([source[kind] for source, _ in self._waiting])
                y = torch.cat([target[kind] for _, target in self._waiting])
                moments.add(x.to(moments.x.device), y.to(moments.x.device))
            self._waiting.clear()

    def owners(self, workers: int) -> dict[tuple[str, Band], int]:
        """Which of `workers` processes adds to each band of `key` and of `value`: shares of equal work."""
        load = [0] * workers
        owner: dict[tuple[str, Band], int] = {}
        bands = [(kind, band) for kind in ("key", "value") for band in getattr(self, kind).bands()]
        for kind, band in sorted(bands, key=lambda one: (-one[1].cost, one)):
            lightest = load.index(min(load))
            owner[kind, band] = lightest
            load[lightest] += band.cost
        return owner

    def share(self, rank: int, workers: int) -> None:
        """Add only to the bands that `rank` owns; sums and counts are kept by every process."""
        for kind, moments in (("key", self.key), ("value", self.value)):
            owned = (band for (k, band), owner in self.owners(workers).items() if (k, owner) == (kind, rank))
            moments.mine = frozenset(owned)

    @property
    def waiting(self) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Windows added since the last block was folded in."""
        return self._waiting

    def merge(self, other: PairMoments) -> None:
        """Add the moments of other rows of the same pair."""
        for moments in (self, other):
            moments.flush()
        self.key.merge(other.key)
        self.value.merge(other.value)

    def reversed(self) -> PairMoments:
        """The moments of the opposite direction, sharing memory."""
        self.flush()
        return PairMoments(self.key.reversed(), self.value.reversed(), [])
