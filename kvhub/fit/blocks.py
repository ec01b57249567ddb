"""Fits whose moments do not fit in memory: some target layers at a time, over captures on disk.

For each block of target layers the captures are read twice: once for the moments of every source layer alone
with the block, which select the layers; once for the Gram of those that were selected by any of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.accumulate import Progress
from kvhub.fit.calibration import row_positions
from kvhub.fit.moments import Moments, PairMoments
from kvhub.fit.recipes.first import repeated
from kvhub.fit.ridge import Factors, Regularization
from kvhub.fit.selection import layer_scores, top_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved, solve_into
from kvhub.model.identity import Geometry

Rows = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def block_bytes(source: Geometry, target: Geometry, settings: FitSettings, layers: int) -> int:
    """Float64 held for a block of `layers` target layers: moments of K and V, rows, one solve, the mapper."""
    wide, part = source.features, layers * target.features
    single = source.num_layers * wide * (wide + part)
    union = wide * min(source.num_layers, layers * settings.grid(source)[-1])
    rows = 4 * PairMoments.BLOCK * (source.num_layers * wide + part)
    width = settings.features(source)
    stored = 2 if settings.store_dtype == "bfloat16" else 4
    mapper = stored * 2 * target.num_layers * target.features * width
    return 8 * (2 * (single + union * (union + part)) + rows + 3 * width * width) + mapper


def layers_at_once(source: Geometry, target: Geometry, settings: FitSettings, available: int) -> int | None:
    """The largest block that `available` bytes hold; None where not even one layer fits."""
    sizes = range(target.num_layers, 0, -1)
    return next((n for n in sizes if block_bytes(source, target, settings, n) <= available), None)


def solve_in_blocks(
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    settings: FitSettings,
    size: int,
    tell: Progress,
    norms: Tensor | None = None,
) -> Solved:
    """Select and solve `size` target layers at a time. Both sides have all captures on disk.

    norms: of `kvhub.fit.recipes.normalise.norms_for`.
    The result is that of a fit in one piece up to the last bits. Errors: `BadInput` for k or lambda
    `auto`; `KvhubError` as in `solve_layer`.
    """
    if settings.automatic:
        raise BadInput("choosing k or lambda needs all moments in memory at once", "give --k and --lambda")
    assert isinstance(settings.regularization, Regularization)
    shapes = source.identity.geometry, target.identity.geometry
    k = settings.grid(shapes[0])[0]
    every = list(range(shapes[0].num_layers))
    blocks = [
        list(range(start, min(start + size, shapes[1].num_layers)))
        for start in range(0, shapes[1].num_layers, size)
    ]
    layers: list[list[int]] = []
    tensors: dict[str, Tensor] = {}
    tell("blocks", 0, len(blocks))
    for number, block in enumerate(blocks, 1):
        part = shapes[1].model_copy(update={"num_layers": len(block)})
        alone = _alone(source, target, windows, settings, every, block)
        one = shapes[0].model_copy(update={"num_layers": 1})
        scores = torch.cat([layer_scores(moments, one, part) for moments in alone], dim=1)
        chosen = top_layers(scores, k)
        union = sorted(set(chain.from_iterable(chosen)))
        moments = _joined(source, target, windows, settings, alone, union)
        del alone
        shape = shapes[0].model_copy(update={"num_layers": len(union)})
        factors = Factors(), Factors()
        for within, layer in enumerate(block):
            places = [union.index(s) for s in chosen[within]]
            solve_into(
                tensors,
                moments,
                shape,
                part,
                layer,
                within,
                places,
                settings.regularization,
                settings,
                factors,
                norms,
            )
        layers += chosen
        tell("blocks", number, len(blocks))
    return Solved(layers, settings.regularization, tensors)


def _alone(
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    settings: FitSettings,
    every: list[int],
    block: list[int],
) -> list[PairMoments]:
    """Moments of each source layer alone with the block."""
    wide = source.identity.geometry.features
    width = len(block) * target.identity.geometry.features
    found = [PairMoments(Moments.zeros(wide, width), Moments.zeros(wide, width), []) for _ in every]
    for x, y in _rows(source, target, windows, settings, every, block):
        for layer, moments in enumerate(found):
            columns = slice(layer * wide, (layer + 1) * wide)
            moments.key.add(x[0][:, columns], y[0])
            moments.value.add(x[1][:, columns], y[1])
    for moments in found:
        moments.flush()
    return found


def _joined(
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    settings: FitSettings,
    alone: list[PairMoments],
    union: list[int],
) -> PairMoments:
    """Moments of the layers of `union` together: their Gram is read now, the rest is in `alone`."""
    width = len(union) * source.identity.geometry.features
    grams = Moments.zeros(width, 0), Moments.zeros(width, 0)
    for x, y in _rows(source, target, windows, settings, union, []):
        for gram, rows, nothing in zip(grams, x, y, strict=True):
            gram.add(rows, nothing)
    joined = []
    for gram, kind in zip(grams, ("key", "value"), strict=True):
        gram.symmetrize()
        parts = [getattr(alone[layer], kind) for layer in union]
        cross = torch.cat([part.xy for part in parts])
        joined.append(Moments(gram.n, gram.x, parts[0].y, gram.xx, cross, parts[0].yy))
    return PairMoments(joined[0], joined[1], [])


def _rows(
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    settings: FitSettings,
    here: list[int],
    there: list[int],
) -> Iterator[Rows]:
    """Rows of some layers of both, many windows at once, as `PairMoments` folds them."""
    assert source.store is not None and target.store is not None
    waiting: list[Rows] = []
    for number, window in enumerate(windows, 1):
        positions = row_positions(len(window), settings.stride, settings.exact_prefix)
        one = source.store.rows(window, positions, here), target.store.rows(window, positions, there)
        weight = settings.first_weight
        waiting.append((repeated(one[0], positions, weight), repeated(one[1], positions, weight)))
        if sum(len(rows[0][0]) for rows in waiting) >= PairMoments.BLOCK or number == len(windows):
            sides = [
                tuple(torch.cat([rows[side][kind] for rows in waiting]) for kind in (0, 1)) for side in (0, 1)
            ]
            waiting.clear()
            yield (sides[0][0], sides[0][1]), (sides[1][0], sides[1][1])
