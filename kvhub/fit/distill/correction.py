"""What is trained of one map: a low-rank correction in units in which one learning rate suits all of it.

Inputs of a map are far from isotropic, and a gradient through the target is noisy: with a step in every
direction of the inputs, noise in the many that hardly vary outweighs what is learned in the few that do.
So the correction reads the leading principal directions of the inputs, whitened,

    W = W_0 + root @ step * spread,    root = directions / sqrt(variance + lambda),

with `spread` the size of the fit's own errors, column by column. A unit of `step` then moves a row by
about one error, whatever the layer and side. W_0 needs no gradient, and the product with `root` is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub.fit.moments import Moments
from kvhub.fit.ridge import Regularization
from kvhub.model.identity import Geometry

WHITENING = Regularization(1e-3)
"""Directions of the inputs with less variance than this share of the mean are not blown up further."""
RANK = 128
"""Directions of the inputs, at most."""
_SPARE = 16
_ROUNDS = 6


@dataclass
class Correction:
    """One side (K or V) of one target layer; all float32, `g` groups of `p` inputs and `c` outputs.

    `full` support is one group, `head-local` one group a head. start `[g, p, c]`; base `[g, 1, c]`: the
    map's output at the mean input; mean `[g, 1, p]`; root `[g, p, r]`; spread `[g, 1, c]`.
    """

    start: Tensor
    base: Tensor
    mean: Tensor
    root: Tensor
    spread: Tensor
    step: Tensor
    """`[g, r, c]`, trained; zero is the fit it started from."""
    shift: Tensor
    """`[g, 1, c]`, trained, in units of `spread`."""

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor,
        moments: Moments,
        inputs: Tensor,
        outputs: Tensor,
        *,
        rank: int = RANK,
        device: torch.device | str = "cpu",
    ) -> Correction:
        """weight, bias: of a mapper of the `ridge` family, however it was fitted. inputs, outputs: the map's
        features in `moments`, `[g, p]` and `[g, c]`.
        """
        place = moments.x.device
        start = (weight if weight.dim() == 3 else weight[None]).to(place, torch.float64)
        gram = moments.centred_xx(inputs[:, :, None], inputs[:, None, :]) / moments.n
        mean = moments.mean_x(inputs)[:, None]
        base = mean @ start + bias.to(place, torch.float64).reshape(len(start), 1, -1)
        spread = _errors(moments, gram, start, base, inputs, outputs)
        root = principal(gram, min(rank, gram.shape[-1]))
        start, base, mean, root, spread = (
            part.to(device, torch.float32) for part in (start, base, mean, root, spread)
        )
        step = torch.zeros(*root.shape[::2], start.shape[2], device=device)
        return cls(start, base, mean, root, spread, step, torch.zeros_like(base))

    def centred(self, rows: Tensor) -> Tensor:
        """Source rows `[rows, k, H_s, D_s]` as this map's inputs about their mean, `[g, rows, p]` float32."""
        if len(self.start) == 1:
            return rows.float().flatten(1)[None] - self.mean
        return rows.float().transpose(1, 2).flatten(2).transpose(0, 1) - self.mean

    def __call__(self, rows: Tensor) -> Tensor:
        """Mapped rows `[rows, g * c]` of source rows `[rows, k, H_s, D_s]`; differentiable."""
        with torch.no_grad():
            centred = self.centred(rows)
            fitted = torch.baddbmm(self.base, centred, self.start)
            white = centred @ self.root
        out = fitted + torch.baddbmm(self.shift, white, self.step) * self.spread
        return out.transpose(0, 1).flatten(1)

    @property
    def trained(self) -> list[Tensor]:
        return [self.step, self.shift]

    def finished(self, dtype: torch.dtype, heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(weight in `dtype` and in the shape of `like`, bias `[heads, head_dim]` float32), as a fit stores
        them: the bias makes up for what rounding does to the mean.
        """
        with torch.no_grad():
            step, shift = self.step.double(), self.shift.double()
            exact = self.start.double() + (self.root.double() @ step) * self.spread.double()
            weight = exact.to(dtype)
            at_mean = self.base.double() + shift * self.spread.double()
            bias = at_mean - self.mean.double() @ weight.double()
        return weight.reshape(like.shape).contiguous(), bias.float().reshape(heads, -1).contiguous()


def principal(gram: Tensor, rank: int) -> Tensor:
    """The `rank` leading eigenvectors of each Gram `[g, p, p]`, over the root of eigenvalue plus lambda.

    By subspace iteration from a fixed start: the leading ones are exact, the last ones span about the same
    space, and whatever space it is, it is the same one every time. `[g, p, rank]` float64.
    """
    width = min(rank + _SPARE, gram.shape[-1])
    start = torch.randn(gram.shape[-1], width, generator=torch.Generator().manual_seed(0), dtype=gram.dtype)
    basis = start.to(gram.device).expand(len(gram), -1, -1)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(gram @ basis).Q
    variances, turn = torch.linalg.eigh(basis.mT @ gram @ basis)
    floor = WHITENING.strength(gram, 1)[:, None]
    scale = (variances.clamp(min=0) + floor).clamp(min=1e-30).rsqrt()
    root: Tensor = (basis @ turn * scale[:, None])[..., -rank:]
    return root


def _errors(
    moments: Moments, gram: Tensor, start: Tensor, base: Tensor, inputs: Tensor, outputs: Tensor
) -> Tensor:
    """Root mean square error of the map on the rows of `moments`, `[g, 1, c]`, at least 1 % of the spread."""
    cross = moments.centred_xy(inputs[:, :, None], outputs[:, None, :]) / moments.n
    total = moments.centred_yy()[outputs][:, None] / moments.n
    explained = 2 * (start * cross).sum(1, keepdim=True) - (start * (gram @ start)).sum(1, keepdim=True)
    offset = base - moments.mean_y(outputs)[:, None]
    squares = total - explained + offset.square()
    floor = torch.clamp(1e-4 * total, min=1e-12)
    return torch.maximum(squares, floor).sqrt()


def features(
    source: Geometry, target: Geometry, target_layer: int, source_layers: list[int], support: str
) -> tuple[Tensor, Tensor]:
    """Moment indices of the inputs `[g, p]` and outputs `[g, c]` of one map."""
    layers = torch.tensor(source_layers)[:, None] * source.features + torch.arange(source.features)
    outputs = target_layer * target.features + torch.arange(target.features)
    if support == "full":
        return layers.reshape(1, -1), outputs[None]
    heads = layers.reshape(len(source_layers), source.num_kv_heads, source.head_dim)
    return heads.transpose(0, 1).flatten(1), outputs.reshape(target.num_kv_heads, target.head_dim)
