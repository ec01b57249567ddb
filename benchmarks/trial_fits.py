"""The fits of `trials.py`: all rows of a pair in memory, and weighted ridges over them.

Attention is the target's own, native: at 32 boundaries of every window, log-spaced, the query of that
position over the rows up to it (CacheBridge, arXiv 2609.00891, takes the first query after the prefix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvhub.evaluation.probe import QueryProbe
from kvhub.fit.recipes.first import LOOK, settled
from kvhub.fit.selection import layer_scores, single_source_r2, top_layers
from kvhub.fit.settings import DEFAULT_RECIPE
from kvhub.study.pair import StudyPair

Kind = Literal["k", "v"]
STRENGTH = 1e-3
"""Relative lambda, the default's."""
BOUNDARIES = 32
FIRST = 12


@dataclass(frozen=True)
class Side:
    """K or V of one target layer: `[rows, k, H_s, D_s]` to `[rows, H_t, D_t]`, float32."""

    layers: list[int]
    weight: Tensor
    """`[p, H_t * D_t]`; of head-local support `[H, p, D_t]`."""
    bias: Tensor
    """`[H_t, D_t]`."""

    def __call__(self, rows: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return (rows.flatten(1) @ self.weight).view(len(rows), *self.bias.shape) + self.bias
        return torch.einsum("rhi,hij->rhj", rows.transpose(1, 2).flatten(2), self.weight) + self.bias


@dataclass(frozen=True)
class Solution:
    """One kind of rows, by target layer."""

    sides: list[Side]


def ridge(x: Tensor, y: Tensor, weights: Tensor | None, share: float, heads: int) -> tuple[Tensor, Tensor]:
    """Weight `[p, c]` and bias `[c]` of rows x `[n, p]`, y `[n, c]`; stretched by `share` over `heads`.

    weights: `[n]`, of mean about 1, for the fit; what is stretched keeps the spread of all rows alike.
    """
    w = torch.ones(len(x)) if weights is None else weights
    total = w.sum()
    mean_x, mean_y = (w @ x) / total, (w @ y) / total
    xc, yc = x - mean_x, y - mean_y
    gram, cross = (xc.T @ (w[:, None] * xc)).double(), (xc.T @ (w[:, None] * yc)).double()
    gram.diagonal().add_(STRENGTH * gram.diagonal().mean())
    weight = torch.linalg.solve(gram, cross).float()
    return stretched(weight, xc, yc, mean_x, mean_y, share, heads)


def stretched(
    weight: Tensor, xc: Tensor, yc: Tensor, mean_x: Tensor, mean_y: Tensor, share: float, heads: int
) -> tuple[Tensor, Tensor]:
    """`kvhub.fit.recipes.scale.stretch` from rows about their means."""
    if share:
        spreads = [r.var(0).view(heads, -1).sum(1) for r in (yc, xc @ weight)]
        ratio = (spreads[0] / spreads[1].clamp_min(1e-30)).sqrt() ** share
        weight = weight * ratio.repeat_interleave(weight.shape[1] // heads)
    return weight, mean_y - mean_x @ weight


@dataclass
class Together:
    """All calibration rows of one direction, and the target's attention over them."""

    pair: StudyPair
    source: dict[Kind, Tensor]
    """`[n, layers, H, D]`; keys are content keys."""
    target: dict[Kind, Tensor]
    raw: Tensor
    """The target's keys before k_norm, like `target["k"]`; empty where it has none."""
    attention: list[Tensor]
    """By window: `[layers, heads, boundaries, tokens]`."""
    queries: list[Tensor]
    """Squared norms of the queries, `[layers, heads, boundaries]`, times scaling^2."""
    norms: list[Tensor]
    counts: Tensor
    """How often each row counts: the default's weight of the sink."""

    @classmethod
    def of(cls, pair: StudyPair) -> Together:
        """One forward of the target a window; the other rows from captures."""
        windows = pair.windows()
        sides = pair.side(pair.source), pair.side(pair.target)
        weight = settled(_default(pair), sides, windows[:LOOK]).first_weight
        rows: list[list[Tensor]] = [[], [], [], [], []]
        attention, queries = [], []
        counts = []
        model: Any = pair.target.model
        modules = [layer.self_attn for layer in model.base_model.layers]
        normed = hasattr(modules[0], "k_norm")
        for window in windows:
            one, two = (side.capture(window) for side in sides)
            for place, parts in enumerate((one.content_keys, one.values, two.content_keys, two.values)):
                rows[place].append(torch.stack([part.to(model.dtype) for part in parts], 1))
            before: list[Tensor] = []
            hooks = [
                module.k_norm.register_forward_pre_hook(lambda _, x, kept=before: kept.append(x[0][0]))
                for module in (modules if normed else ())
            ]
            with QueryProbe(model, len(window)) as probe:
                model.base_model(input_ids=window[None].to(model.device))
            for hook in hooks:
                hook.remove()
            if normed:
                rows[4].append(torch.stack(before, 1))
            seen = _attention(probe, two.keys, len(window))
            attention.append(seen[0])
            queries.append(seen[1])
            counts.append(torch.ones(len(window)).index_fill_(0, torch.zeros(1, dtype=torch.long), weight))
        joined = [torch.cat(part) if part else torch.empty(0) for part in rows]
        norms = [module.k_norm.weight.float() for module in modules] if normed else []
        return cls(
            pair, {"k": joined[0], "v": joined[1]}, {"k": joined[2], "v": joined[3]}, joined[4],
            attention, queries, norms, torch.cat(counts),
        )  # fmt: skip

    @cached_property
    def shapes(self) -> tuple[Any, Any]:
        """(source, target)."""
        return self.pair.source.identity.geometry, self.pair.target.identity.geometry

    @property
    def heads_match(self) -> bool:
        return bool(self.shapes[0].num_kv_heads == self.shapes[1].num_kv_heads)

    def layers(self, kind: Kind, local: bool, own: bool) -> list[list[int]]:
        """Selected source layers. own: by the R2 of this kind alone."""
        moments = self.pair.moments()
        side = moments.key if kind == "k" else moments.value
        scores = single_source_r2(side, *self.shapes) if own else layer_scores(moments, *self.shapes)
        k = self.pair.settings.k
        assert isinstance(k, int)
        return top_layers(scores, min(2 * k, self.shapes[0].num_layers) if local else k)

    def solve(
        self, kind: Kind, y: Tensor, weights: Sequence[Tensor | None], *, local: bool, own: bool = False
    ) -> Solution:
        """y: `[n, layers, H, D]`. weights: by layer `[n, H]`, or None."""
        share = DEFAULT_RECIPE["stretch" if kind == "k" else "stretch_values"]
        heads, dim = self.shapes[1].num_kv_heads, self.shapes[1].head_dim
        found = []
        for number, chosen in enumerate(self.layers(kind, local, own)):
            x, rows = self.source[kind][:, chosen].float(), y[:, number].float()
            counts = weights[number]
            if local:
                parts = [
                    ridge(x[:, :, h].flatten(1), rows[:, h], self._counts(counts, h), share, 1)
                    for h in range(heads)
                ]
                weight, bias = (torch.stack([part[i] for part in parts]) for i in (0, 1))
            else:
                weight, bias = ridge(x.flatten(1), rows.flatten(1), self._counts(counts, None), share, heads)
            found.append(Side(list(chosen), weight, bias.view(heads, dim)))
        return Solution(found)

    def _counts(self, weights: Tensor | None, head: int | None) -> Tensor:
        if weights is None:
            return self.counts
        return self.counts * (weights.mean(1) if head is None else weights[:, head])

    def plain(self, kind: Kind, *, local: bool = False, own: bool = False) -> Solution:
        """The default's closed form."""
        return self.solve(kind, self.target[kind], [None] * self.shapes[1].num_layers, local=local, own=own)

    def weighted(self, kind: Kind, *, local: bool = False) -> Solution:
        """CacheBridge's Attn-Repair; at full support a layer's heads share the mean of their weights."""
        width = self.pair.settings.width(self.shapes[0], len(self.layers(kind, local, False)[0]))
        width = width // self.shapes[0].num_kv_heads if local else width
        weights = [self._sensitivity(kind, n, width) for n in range(self.shapes[1].num_layers)]
        return self.solve(kind, self.target[kind], weights, local=local)

    def _sensitivity(self, kind: Kind, layer: int, width: int) -> Tensor:
        """`[n, H]`: r^V = sum_u a^2, r^K = sum_u a^2 |v - o|^2 |q|^2 / d, unit mass a boundary, shrunk."""
        heads = self.shapes[1].num_kv_heads
        parts, at = [], 0
        for attention, queries in zip(self.attention, self.queries, strict=True):
            a = attention[layer].float()
            count = a.shape[-1]
            r = a.square()
            if kind == "k":
                v = self.target["v"][at : at + count, layer].float().transpose(0, 1)
                v = v.repeat_interleave(len(a) // heads, 0)
                o = a @ v
                apart = v.square().sum(-1)[:, None] - 2 * o @ v.mT + o.square().sum(-1, keepdim=True)
                r = r * apart.clamp_min(0) * queries[layer][..., None]
            r = r.view(heads, -1, *r.shape[1:]).sum(1)  # over the queries of a KV head
            parts.append((r / r.sum(-1, keepdim=True).clamp_min(1e-30)).sum(1).T)
            at += count
        r = torch.cat(parts)
        r = r / r.mean(0)
        n = len(r)
        spread = r.var(0, correction=0)  # of mean 1: the squared coefficient of variation
        alpha = ((n / min(n, 2 * width) - 1) / spread.clamp_min(1e-30)).sqrt().clamp(max=1)
        return 1 + alpha * (r - 1)

    def pooled(self, anchor: float) -> Solution:
        """V on what attention pools: |sum_i a_i (W x_i + b - v_i)|^2, every head its own Gram, full support.

        anchor: weight of the plain errors of all rows beside it, both relative to their own mean.
        """
        share = DEFAULT_RECIPE["stretch_values"]
        heads, dim = self.shapes[1].num_kv_heads, self.shapes[1].head_dim
        found = []
        for number, chosen in enumerate(self.layers("v", False, False)):
            x = self.source["v"][:, chosen].flatten(1).float()
            y = self.target["v"][:, number].float()
            mean_x, mean_y = (self.counts @ x) / self.counts.sum(), y.flatten(1).mean(0).view(heads, dim)
            mean_y = ((self.counts @ y.flatten(1)) / self.counts.sum()).view(heads, dim)
            xc = x - mean_x
            plain = (xc.T @ (self.counts[:, None] * xc)).double()
            plain_scale = plain.diagonal().mean()
            weights = []
            for head in range(heads):
                yc = y[:, head] - mean_y[head]
                px, py = self._pool(number, head, xc, yc)
                gram, scale = (px.T @ px).double(), px.square().sum(0).mean().double()
                cross = (px.T @ py).double() / scale
                cross += anchor * (xc.T @ (self.counts[:, None] * yc)).double() / plain_scale
                whole = gram / scale + anchor * plain / plain_scale
                whole.diagonal().add_(STRENGTH * anchor)
                weights.append(torch.linalg.solve(whole, cross).float())
            yc = y.flatten(1) - mean_y.flatten()
            weight, bias = stretched(torch.cat(weights, 1), xc, yc, mean_x, mean_y.flatten(), share, heads)
            found.append(Side(list(chosen), weight, bias.view(heads, dim)))
        return Solution(found)

    def _pool(self, layer: int, head: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as the queries of one KV head pool them, boundary after boundary."""
        heads = self.shapes[1].num_kv_heads
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        at = 0
        for attention in self.attention:
            a = attention[layer].float()
            a = a.view(heads, -1, *a.shape[1:])[head].flatten(0, 1)
            for kept, rows in zip(found, (x, y), strict=True):
                kept.append(a @ rows[at : at + a.shape[1]])
            at += a.shape[1]
        return torch.cat(found[0]), torch.cat(found[1])

    def unscaled(self, keys: Solution) -> Solution:
        """Keys as they are before the weight of k_norm, up to their length: k_norm then gives that back."""
        return Solution([
            Side(s.layers, s.weight / norm.repeat(len(s.bias)), s.bias / norm)
            for s, norm in zip(keys.sides, self.norms, strict=True)
        ])  # fmt: skip

    def before_norm(self) -> Solution:
        """Keys fitted to those before k_norm (KV-Lingo, arXiv 2609.32610)."""
        return self.solve("k", self.raw, [None] * len(self.norms), local=False)


def _default(pair: StudyPair) -> Any:
    from dataclasses import replace

    return replace(pair.settings, **DEFAULT_RECIPE)


def _attention(probe: QueryProbe, keys: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Causal attention at the boundaries and the squared norms of its queries."""
    steps = torch.linspace(math.log(min(FIRST, length - 1)), math.log(length - 1), BOUNDARIES).exp()
    places = steps.round().long().unique()
    mask = torch.arange(length)[None] > places[:, None]
    weights, sizes = [], []
    for layer, key in enumerate(keys):
        query = probe.queries[layer][:, places].float()
        scaling = probe.scaling[layer]
        k = key.float().transpose(0, 1).repeat_interleave(len(query) // key.shape[1], 0)
        logits = (query @ k.mT * scaling).masked_fill(mask, -torch.inf)
        weights.append(logits.softmax(-1).half())
        sizes.append(query.square().sum(-1) * scaling**2)
    return torch.stack(weights), torch.stack(sizes)
