"""Source x target R2 maps: which layer of the source says what about which layer of the target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kvhub.diagnostics.observe import Observation
from kvhub.fit.moments import Moments, PairMoments
from kvhub.fit.selection import single_source_r2
from kvhub.model.identity import Geometry, RopeSpec
from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import strip_rope


class R2Maps(NamedTuple):
    """Each `[target layers, source layers]` float64."""

    raw_key: Tensor
    """Keys as cached, RoPE on both sides."""
    content_key: Tensor
    value: Tensor


class PairRows:
    """Moments of rotated keys, content keys and values over the prefixes of observed windows."""

    def __init__(self, source: Geometry, target: Geometry) -> None:
        self.source, self.target = source, target
        self.moments = PairMoments.zeros(source, target)
        features = source.num_layers * source.features, target.num_layers * target.features
        self.raw_key = Moments.zeros(*features)

    def add(self, seen: Observation, source_rope: RopeSpec, *, start: int = 0) -> None:
        """Add the rows of one window's prefix, from position `start` on."""
        prefix = seen.prefix
        sides = (seen.source.keys, source_rope), (prefix.keys, seen.rope)
        content = [_content(keys, rope, start) for keys, rope in sides]
        values = [_flat([v[start:] for v in rows]) for rows in (seen.source.values, prefix.values)]
        self.moments.add((content[0], values[0]), (content[1], values[1]))
        self.raw_key.add(*(_flat([k[start:] for k in rows]) for rows in (seen.source.keys, prefix.keys)))

    def maps(self) -> R2Maps:
        """arXiv 2608.03893, section 2.3: R2 of an ordinary least squares with bias from one source head to
        the matched target head, in sample, averaged over the target's heads."""
        self.moments.flush()
        self.raw_key.symmetrize()
        sides = self.raw_key, self.moments.key, self.moments.value
        return R2Maps(*(single_source_r2(side, self.source, self.target) for side in sides))


def r2_maps(seen: Iterable[Observation], source: Geometry, target: Geometry, source_rope: RopeSpec) -> R2Maps:
    """The maps over the prefixes of some windows; a few thousand tokens are enough (rows >> head_dim)."""
    rows = PairRows(source, target)
    for one in seen:
        rows.add(one, source_rope)
    return rows.maps()


def _content(keys: tuple[Tensor, ...], rope: RopeSpec, start: int) -> Tensor:
    table = rotary_table(rope, torch.arange(len(keys[0]), device=keys[0].device)[start:])
    return _flat([strip_rope(key[start:].float(), table) for key in keys])


def _flat(rows: Iterable[Tensor]) -> Tensor:
    return torch.cat([row.flatten(1).to("cpu", torch.float64) for row in rows], dim=1)
