"""R2 of a finished mapper on held-out windows, with the weights as they will be stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvhub.artifact.manifest import FitScores
from kvhub.fit.capture import Capture
from kvhub.model.identity import HIGHEST
from kvhub_kernels.normalise import normalise

Apply = Callable[[Mapping[str, Tensor], str, Tensor], Tensor]
"""One side of one target layer: (tensors, `layers.{t}.{k,v}`, source rows `[rows, k, H_s, D_s]`) to rows."""


def apply_ridge(tensors: Mapping[str, Tensor], prefix: str, rows: Tensor) -> Tensor:
    """`Apply` for the `ridge` families, in float32 where the rows are; returns `[rows, H_t, D_t]`.

    Keys go through the target's k_norm where the tensors have its weight.
    """
    weight = tensors[f"{prefix}.weight"].to(rows.device, torch.float32)
    bias = tensors[f"{prefix}.bias"].to(rows.device, torch.float32)
    mapped = apply_affine(rows, weight, bias)
    norm = tensors.get(f"{prefix}.norm")
    return mapped if norm is None else normalise(mapped, norm.to(rows.device))


class HeldOutScore:
    """Accumulates errors of one mapper, window by window.

    R2 of a target layer is 1 - (squared errors) / (squares about the mean), both
    summed over heads, dimensions and rows; keys in content space.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source_layers: Sequence[Sequence[int]],
        apply: Apply = apply_ridge,
    ) -> None:
        self._tensors = tensors
        self._layers = source_layers
        self._apply = apply
        self._rows = 0
        self._errors = torch.zeros(2, len(source_layers), dtype=torch.float64)
        self._squares = torch.zeros(2, len(source_layers), dtype=torch.float64)
        self._sums: list[list[Tensor]] = [[], []]

    def add(self, source: Capture, target: Capture, positions: range) -> None:
        """Score the rows of one window."""
        chosen = slice(positions.start, positions.stop, positions.step)
        self._rows += len(positions)
        kinds = (("k", source.content_keys, target.content_keys), ("v", source.values, target.values))
        for kind, (name, inputs, outputs) in enumerate(kinds):
            for number, layers in enumerate(self._layers):
                x = torch.stack([inputs[layer][chosen].float() for layer in layers], dim=1)
                y = outputs[number][chosen].double().flatten(1)
                found = self._apply(self._tensors, f"layers.{number}.{name}", x).double().flatten(1)
                self._errors[kind, number] += (y - found).square().sum().cpu()
                self._squares[kind, number] += y.square().sum().cpu()
                if len(self._sums[kind]) == number:
                    self._sums[kind].append(torch.zeros_like(y[0]))
                self._sums[kind][number] += y.sum(0)

    def result(self) -> FitScores:
        """R2 per target layer; a layer that never varies scores 0."""
        r2: list[list[float]] = []
        for kind in range(2):
            means = torch.stack([s.square().sum() for s in self._sums[kind]]).cpu() / self._rows
            spread = self._squares[kind] - means
            ratio = torch.where(spread > 0, 1 - self._errors[kind] / spread, 0.0)
            r2.append(ratio.nan_to_num(0.0, 0.0, 0.0).clamp(min=-HIGHEST).tolist())
        return FitScores(rows=self._rows, r2_key=r2[0], r2_value=r2[1])


def apply_affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x @ weight + bias` for rows x `[rows, k, H_s, D_s]`; returns `[rows, H_t, D_t]`."""
    if weight.dim() == 3:
        return torch.einsum("rhi,hij->rhj", x.transpose(1, 2).flatten(2), weight) + bias
    return (x.flatten(1) @ weight).reshape(len(x), *bias.shape) + bias
