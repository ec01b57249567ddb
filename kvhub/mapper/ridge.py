"""The `ridge` family: one affine map per target layer, for K and for V (arXiv 2608.03893, section 3); and
`ridge-k-norm`, whose mapped keys then go through the target's k_norm.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvhub.artifact.tensors import expected_tensors
from kvhub.errors import Corrupt
from kvhub.mapper.base import Mapper, SourceRows
from kvhub.model.rope import rotary_table
from kvhub_kernels.apply import Applier, make_applier, ready_bytes, uses_triton
from kvhub_kernels.arriving import Arriving, Lane, apply_arriving, make_lane
from kvhub_kernels.normalise import normalise
from kvhub_kernels.plan import Plan
from kvhub_kernels.resident import Resident
from kvhub_kernels.rotary import RotaryTable, apply_rope
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Weights

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
        # A bias may be a hundred times the spread of its rows: it is never rounded. int8 stays as it is.
        kept = {"bias": torch.float32, "scale": torch.float32, "norm": torch.float32}
        if manifest.weights_dtype == "int8":
            kept["weight"] = torch.int8
        self._tensors = {
            name: tensor.to(self.device, kept.get(name.rpartition(".")[2], dtype))
            for name, tensor in tensors.items()
        }
        self._resident: Resident | None = None
        self._token = object()  # two mappers may hold the same artifact
        self._sizes: dict[tuple[object, torch.device, torch.dtype], int] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._appliers: dict[tuple[torch.device, torch.dtype], Applier] = {}
        self._making = threading.Lock()
        self._bringing = threading.Lock()

    def affine(self, target_layer: int, side: str) -> Affine:
        """Weight in the compute dtype and bias in float32, of `side` (`k` or `v`) of one target layer."""
        weight, bias, *scale = self.stored(target_layer, side)
        if scale:
            head_local = self.manifest.support == "head-local"
            columns = scale[0][:, None, :] if head_local else scale[0].flatten()
            weight = weight.to(torch.float32).mul_(columns).to(self.dtype)
        return Affine(weight, bias)

    def norm(self, target_layer: int) -> Tensor | None:
        """The weight `[head_dim]` of the target's k_norm in that layer, float32; None: keys are not
        normalised.
        """
        return self._tensors.get(f"layers.{target_layer}.k.norm")

    def stored(self, target_layer: int, side: str) -> tuple[Tensor, ...]:
        """Weight and bias, and the scale of int8 weights, as they are held."""
        names = [f"layers.{target_layer}.{side}.{part}" for part in ("weight", "bias", "scale")]
        return tuple(self._tensors[name] for name in names if name in self._tensors)

    def map_layer(self, target_layer: int, source: SourceRows) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        layers = self.manifest.source_layers[target_layer]
        content = self._apply(target_layer, "k", [source.content_keys(layer, self.dtype) for layer in layers])
        values = self._apply(target_layer, "v", [source.values(layer).to(self.dtype) for layer in layers])
        norm, turn = self.norm(target_layer), source.table(self.manifest.target.rope)
        if norm is None:
            return apply_rope(content, turn), values
        return apply_rope(normalise(content, norm), turn).to(self.dtype), values

    def map_rows(self, source: SourceRows, target: Rows) -> Tensor:
        """See `Mapper.map_rows`. All layers at once, by the kernels, wherever `target` lies.

        On CUDA the products are bfloat16 unless the cache is float32; the mapper itself may stay on the CPU.
        """
        turn = source.table(self.manifest.target.rope)
        applier = self.applier(target.device, self._products(target.device, target.dtype), turn)
        return applier.apply(source.rows(), target, source.strip, turn)

    def map_blocks(self, blocks: Sequence[Tensor], positions: Tensor, target: Rows) -> Tensor:
        """See `Mapper.map_blocks`. Mapped as they land: on CUDA the next blocks are copied meanwhile."""
        strip = rotary_table(self.manifest.source.rope, positions)
        turn = rotary_table(self.manifest.target.rope, positions)
        applier = self.applier(target.device, self._products(target.device, target.dtype), turn)
        with self._making:
            lane = self._lanes.get(target.device) or make_lane(target.device)
            self._lanes[target.device] = lane
        with self._bringing:  # a lane serves one caller at a time
            return apply_arriving(applier, Arriving(blocks), target, strip, turn, lane)

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """See `Mapper.prepare`: the kernels' form of the weights, on the device."""
        device = torch.device(device)
        turn = rotary_table(self.manifest.target.rope, torch.zeros(1, dtype=torch.int64))
        self.applier(device, self._products(device, dtype), turn)

    def hold(self, device: torch.device | str, dtype: torch.dtype) -> object | None:
        """See `Mapper.hold`."""
        if self._resident is None:
            return self
        device = torch.device(device)
        return self._resident.find((self._token, device, self._products(device, dtype)))

    def keep_in(self, resident: Resident) -> None:
        """See `Mapper.keep_in`."""
        with self._making:
            self._resident = resident
            self._appliers.clear()

    def let_go(self) -> None:
        """See `Mapper.let_go`."""
        with self._making:
            self._appliers.clear()
        for key in list(self._sizes):
            if self._resident is not None:
                self._resident.drop(key)

    def engine(self, device: torch.device | str) -> str:
        """See `Mapper.engine`."""
        device = torch.device(device)
        if uses_triton(device):
            return "triton" if device.type == "cuda" else "triton (interpreted)"
        return f"matrix products in {str(self.dtype).removeprefix('torch.')}"

    def _products(self, device: torch.device, cached: torch.dtype) -> torch.dtype:
        if device.type != "cuda":
            return self.dtype
        return torch.float32 if cached == torch.float32 else torch.bfloat16

    def applier(self, device: torch.device, dtype: torch.dtype, turn: RotaryTable) -> Applier:
        """The kernels' form of this mapper, made on first use and kept (see `keep_in`)."""

        def make() -> Applier:
            return make_applier(self.weights(), turn, device=device, dtype=dtype)

        if self._resident is not None:
            key = (self._token, device, dtype)
            if key not in self._sizes:
                self._sizes[key] = ready_bytes(self.weights(), device, dtype)
            ready: Applier = self._resident.get(key, self._sizes[key], make)
            return ready
        with self._making:
            known = self._appliers.get((device, dtype))
            if known is None:
                known = self._appliers[device, dtype] = make()
            return known

    def weights(self) -> Weights:
        """The tensors as the kernels name them; nothing is copied."""
        source, target = self.manifest.source.geometry, self.manifest.target.geometry
        plan = Plan(
            self.manifest.support,
            tuple(tuple(chosen) for chosen in self.manifest.source_layers),
            source.num_kv_heads,
            source.head_dim,
            target.num_kv_heads,
            target.head_dim,
        )
        norms = [self.norm(layer) for layer in range(target.num_layers)]
        return Weights.of(plan, self.stored, [n for n in norms if n is not None] or None)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> RidgeMapper:
        """A copy on `device` computing in `dtype` (None: as now)."""
        return RidgeMapper(self.manifest, self._tensors, device=device, dtype=dtype or self.dtype)

    def _apply(self, target_layer: int, side: str, rows: list[Tensor]) -> Tensor:
        """rows: k tensors `[tokens, H_s, D_s]` -> `[tokens, H_t, D_t]`."""
        weight, bias = self.affine(target_layer, side)
        # What cancels in the product cancels before it is rounded: see `kvhub_kernels.product`.
        coarse = bias.to(self.dtype)
        if self.manifest.support == "head-local":
            per_head = torch.cat(rows, dim=-1).transpose(0, 1)  # [H, tokens, k * D_s]
            out = torch.baddbmm(coarse[:, None, :], per_head, weight).transpose(0, 1)
        else:
            flat = torch.cat([row.flatten(1) for row in rows], dim=-1)  # [tokens, k * H_s * D_s]
            out = torch.addmm(coarse.flatten(), flat, weight).view(-1, *bias.shape)
        return out if self.dtype == torch.float32 else (out + (bias - coarse)).to(self.dtype)
