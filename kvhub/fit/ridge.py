"""Centred ridge regression with bias, one factorisation per target layer (arXiv 2608.03893, eq. 3-5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from kvhub.errors import KvhubError
from kvhub.fit.moments import Moments
from kvhub.model.identity import Geometry

Convention = Literal["relative-mean-diagonal", "absolute-mean"]
Support = Literal["full", "head-local"]


@dataclass(frozen=True)
class Regularization:
    """lambda of (Gram + lambda I) W = cross, on summed, centred moments.

    `relative-mean-diagonal`: value * mean(diag(Gram)), so that one value suits
    keys and values of every scale. `absolute-mean`: value * rows, the paper's
    lambda read per token (Gram / N + value * I).
    """

    value: float = 1e-3
    convention: Convention = "relative-mean-diagonal"

    def strength(self, gram: Tensor, rows: int) -> Tensor:
        """lambda for each Gram of `gram` (`[..., a, a]`), shape `[...]`."""
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        if self.convention == "absolute-mean":
            return torch.full(diagonal.shape[:-1], self.value * rows, dtype=gram.dtype, device=gram.device)
        return self.value * diagonal.mean(-1)


PAPER = Regularization(0.01, "absolute-mean")


@dataclass(frozen=True)
class Affine:
    """`out = (x - mean_x) @ weight + mean_y`, float64.

    full: weight `[k * H_s * D_s, H_t * D_t]` (rows: selected layers ascending,
    then head, then dimension), mean_x `[k * H_s * D_s]`, mean_y `[H_t * D_t]`;
    head-local: weight `[H, k * D_s, D_t]`, target head h reading source head h,
    mean_x `[H, k * D_s]`, mean_y `[H, D_t]`.
    """

    weight: Tensor
    mean_x: Tensor
    mean_y: Tensor

    def bias(self, weight: Tensor | None = None) -> Tensor:
        """The bias of `out = x @ weight + bias`, shaped like `mean_y`.

        weight: the weights as rounded for storage; the bias then makes up for
        what rounding does to the mean, which is large where keys have large biases.
        """
        used = self.weight if weight is None else weight.to(torch.float64)
        return self.mean_y - (self.mean_x[..., None, :] @ used)[..., 0, :]


class Factors:
    """The last Cholesky factor of one side: with k = all, every target layer has the same."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._factor: Tensor | None = None

    def get(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """The factor for `key`, made if it is not the last one."""
        if self._factor is None or key != self._key:
            self._factor = None  # freed before the next one is made
            self._key, self._factor = key, make()
        return self._factor


def solve_layer(
    moments: Moments,
    source: Geometry,
    target: Geometry,
    target_layer: int,
    source_layers: Sequence[int],
    regularization: Regularization,
    *,
    support: Support = "full",
    factors: Factors | None = None,
    name: int | None = None,
) -> Affine:
    """Fit one target layer's K or V from the selected source layers.

    All heads share the Gram and its Cholesky factor (`full`); head-local solves
    one small system per head, with lambda relative to that head's own Gram.
    factors: where the last factor is kept. name: of the layer in messages, where `moments` hold a part.
    Errors: `KvhubError` where the regularised Gram is not positive definite.
    """
    inputs, outputs = indices(source, target, target_layer, source_layers, support, moments.x.device)

    def factorise() -> Tensor:
        gram = moments.centred_xx(inputs[..., :, None], inputs[..., None, :])
        strength = regularization.strength(gram, moments.n)
        gram.diagonal(dim1=-2, dim2=-1).add_(strength[..., None])
        factor, failed = torch.linalg.cholesky_ex(gram)
        if bool(failed.any()):
            raise KvhubError(
                f"the moments of target layer {target_layer if name is None else name} are not positive"
                f" definite (lambda {regularization.value:g}, {moments.n} rows)",
                "use a larger --lambda, or more text",
            )
        return cast(Tensor, factor)

    factor = (factors or Factors()).get((tuple(source_layers), regularization, support), factorise)
    cross = moments.centred_xy(inputs[..., :, None], outputs[..., None, :])
    weight = torch.cholesky_solve(cross, factor)
    return Affine(weight, moments.mean_x(inputs), moments.mean_y(outputs))


def indices(
    source: Geometry,
    target: Geometry,
    target_layer: int,
    source_layers: Sequence[int],
    support: Support,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Moment indices of inputs `[..., a]` and outputs `[..., b]`; a leading head axis for head-local."""
    layers = torch.tensor(list(source_layers), device=device)
    inputs = layers[:, None] * source.features + torch.arange(source.features, device=device)
    outputs = target_layer * target.features + torch.arange(target.features, device=device)
    if support == "full":
        return inputs.flatten(), outputs
    heads = inputs.reshape(len(layers), source.num_kv_heads, source.head_dim)
    return heads.transpose(0, 1).flatten(1), outputs.reshape(target.num_kv_heads, target.head_dim)
