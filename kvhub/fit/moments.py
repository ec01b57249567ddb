"""Streaming moments of source and target rows: one pass, then every fit is a sub-block solve.

Everything is accumulated in float64: in float32 the centred Gram of values
becomes indefinite (the products of large means cancel) and the fit loses a
quarter of its held-out R2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.model.identity import Geometry


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
        self.xy.addmm_(x.T, y)
        _add_upper(self.xx, x)
        if self.yy.dim() == 2:
            _add_upper(self.yy, y)
        else:
            self.yy += y.square().sum(0)

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
        return self.xx[rows, columns] - self.x[rows] * self.x[columns] / self.n

    def centred_xy(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Sub-block of the centred cross-moments, indexed like `centred_xx`."""
        return self.xy[rows, columns] - self.x[rows] * self.y[columns] / self.n

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


def _bands(size: int) -> list[tuple[int, int]]:
    step = max(256, -(-size // 8))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _add_upper(gram: Tensor, rows: Tensor) -> None:
    # Eight bands on and right of the diagonal: 9/16 of the products of the whole square.
    for start, stop in _bands(len(gram)):
        gram[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])


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
            self._fold()

    def flush(self) -> None:
        """Fold waiting rows in and make the Grams whole; called before the moments are read."""
        self._fold()
        self.key.symmetrize()
        self.value.symmetrize()

    def _fold(self) -> None:
        if self._waiting:
            for kind, moments in enumerate((self.key, self.value)):
                x = torch.cat([source[kind] for source, _ in self._waiting])
                y = torch.cat([target[kind] for _, target in self._waiting])
                moments.add(x.to(moments.x.device), y.to(moments.x.device))
            self._waiting.clear()

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


def memory_needed(source: Geometry, target: Geometry, *, k: int, both: bool) -> int:
    """Bytes of float64 that a fit holds at its peak.

    Moments for K and for V: 2 * 8 * F_s * (F_s + F_t), and 2 * 8 * F_t**2 more for
    both directions, with F = layers * kv_heads * head_dim; one block of rows; and
    three copies of the largest Gram that is solved.
    """
    wide, other = source.num_layers * source.features, target.num_layers * target.features
    moments = 2 * wide * (wide + other) + (2 * other * other if both else 2 * other)
    rows = 4 * PairMoments.BLOCK * (wide + other)
    gram = k * max(source.features, target.features if both else 0)
    return 8 * (moments + rows + 3 * gram * gram)


def demand_memory(
    source: Geometry, target: Geometry, *, k: int, both: bool, available: int | None = None
) -> None:
    """Refuse (`BadInput`) before any forward is run where the moments cannot fit.

    available: bytes; None asks the operating system (and says nothing where it does not know).
    """
    needed = memory_needed(source, target, k=k, both=both)
    have = _free_memory() if available is None else available
    if have is not None and needed > have:
        advice = "use a machine with more memory"
        raise BadInput(
            f"the moments of this pair need {needed / 1e9:.1f} GB and {have / 1e9:.1f} GB are free"
            " (16 * F_s * (F_s + F_t) bytes, F = layers * kv_heads * head_dim)",
            f"fit one direction at a time, or {advice}" if both else advice,
        )


def moments_device(model_device: torch.device, needed: int) -> torch.device:
    """Where moments of `needed` bytes are kept: beside the models if they fit there, else in main memory."""
    if model_device.type == "cuda" and torch.cuda.mem_get_info(model_device)[0] > 1.2 * needed:
        return model_device
    return torch.device("cpu")


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
