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

WHITENING = 1e-3
"""Directions of the inputs with less variance than this share of the mean are not blown up further."""
RANK = 64
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
        inputs: Tensor,
        outputs: Tensor,
        *,
        rank: int = RANK,
        device: torch.device | str = "cpu",
    ) -> Correction:
        """A correction of nothing. weight, bias: of a mapper of the `ridge` family, however it was fitted.

        inputs, outputs: a sample of rows, `[n, k, H_s, D_s]` and `[n, H_t, D_t]`, that means, directions and
        errors are taken from.
        """
        start = (weight if weight.dim() == 3 else weight[None]).float()
        rows, wanted = grouped(inputs, len(start)), grouped(outputs[:, None], len(start))
        mean = rows.mean(1, keepdim=True)
        base = mean.double() @ start.double() + bias.double().reshape(len(start), 1, -1)
        centred = rows - mean
        errors = wanted - torch.baddbmm(base.float(), centred, start)
        floor = 1e-2 * wanted.std(1, keepdim=True, correction=0) + 1e-6
        spread = torch.maximum(errors.square().mean(1, keepdim=True).sqrt(), floor)
        root = principal(centred, rank)
        start, base, mean, root, spread = (
            part.to(device, torch.float32) for part in (start, base, mean, root, spread)
        )
        step = torch.zeros(*root.shape[::2], start.shape[2], device=device)
        return cls(start, base, mean, root, spread, step, torch.zeros_like(base))

    def centred(self, rows: Tensor) -> Tensor:
        """Source rows `[rows, k, H_s, D_s]` as this map's inputs about their mean, `[g, rows, p]` float32."""
        return grouped(rows, len(self.start)) - self.mean

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


def grouped(rows: Tensor, groups: int) -> Tensor:
    """Rows `[n, layers, heads, dim]` side by side, `[1, n, layers * heads * dim]`; by head where there are
    several groups, `[heads, n, layers * dim]`. float32.
    """
    if groups == 1:
        return rows.float().flatten(1)[None]
    return rows.float().transpose(1, 2).flatten(2).transpose(0, 1)


def principal(centred: Tensor, rank: int) -> Tensor:
    """The leading principal directions of rows `[g, n, p]` about their mean, over the root of variance plus
    lambda: `[g, p, r]`, r at most `rank`.

    By subspace iteration from a fixed start: the leading ones are exact, the last ones span about the same
    space, and it is the same one every time. A Gram of the inputs would cost more than the fit.
    """
    count, width = centred.shape[1:]
    wide = min(rank + _SPARE, width, count)
    start = torch.randn(width, wide, generator=torch.Generator().manual_seed(0))
    basis = start.to(centred.device).expand(len(centred), -1, -1)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    scores = (centred @ basis).double()
    variances, turn = torch.linalg.eigh(scores.mT @ scores / count)
    floor = WHITENING * centred.square().mean((1, 2), dtype=torch.float64)[:, None]
    scale = (variances.clamp(min=0) + floor).clamp(min=1e-30).rsqrt()
    root: Tensor = (basis.double() @ turn * scale[:, None])[..., -rank:]
    return root
