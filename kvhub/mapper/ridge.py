"""The `ridge` family: one affine map per target layer, for K and for V (arXiv 2608.03893, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvhub.artifact.tensors import expected_tensors
from kvhub.errors import Corrupt
from kvhub.mapper.base import Mapper, SourceRows
from kvhub_kernels.rotary import apply_rope

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest


class Affine(NamedTuple):
    """`out = x @ weight + bias`; shapes as in `kvhub.artifact.tensors.expected_tensors`."""

    weight: Tensor
    bias: Tensor


class RidgeMapper(Mapper):
    """Source rows of the selected layers, concatenated, times a matrix, plus a bias.

    Computes in float32 unless `to(dtype=...)` says otherwise: then the rows, once RoPE is removed
    in float32, and the weights are rounded to that dtype before the product.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """tensors: exactly `expected_tensors(manifest)`. Errors: `Corrupt`."""
        super().__init__(manifest)
        for name, shape in expected_tensors(manifest).items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                raise Corrupt(f"tensor {name!r} is missing or not {list(shape)}")
        self.device = torch.device(device)
        self.dtype = dtype
        self._tensors = {name: tensor.to(self.device, dtype) for name, tensor in tensors.items()}

    def affine(self, target_layer: int, side: str) -> Affine:
        """Weight and bias of `side` (`k` or `v`) of one target layer, in the compute dtype."""
        prefix = f"layers.{target_layer}.{side}"
        return Affine(self._tensors[f"{prefix}.weight"], self._tensors[f"{prefix}.bias"])

    def map_layer(self, target_layer: int, source: SourceRows) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        layers = self.manifest.source_layers[target_layer]
        content = self._apply(target_layer, "k", [source.content_keys(layer, self.dtype) for layer in layers])
        values = self._apply(target_layer, "v", [source.values(layer).to(self.dtype) for layer in layers])
        return apply_rope(content, source.table(self.manifest.target.rope)), values

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> RidgeMapper:
        """A copy on `device` computing in `dtype` (None: as now)."""
        return RidgeMapper(self.manifest, self._tensors, device=device, dtype=dtype or self.dtype)

    def _apply(self, target_layer: int, side: str, rows: list[Tensor]) -> Tensor:
        """rows: k tensors `[tokens, H_s, D_s]` -> `[tokens, H_t, D_t]`."""
        weight, bias = self.affine(target_layer, side)
        if self.manifest.support == "head-local":
            per_head = torch.cat(rows, dim=-1).transpose(0, 1)  # [H, tokens, k * D_s]
            return torch.baddbmm(bias[:, None, :], per_head, weight).transpose(0, 1)
        flat = torch.cat([row.flatten(1) for row in rows], dim=-1)  # [tokens, k * H_s * D_s]
        return torch.addmm(bias.flatten(), flat, weight).view(-1, *bias.shape)
