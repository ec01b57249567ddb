"""The identity of a model: bytes and numbers, never a name.

Two caches may be exchanged, and a mapper may be applied, only where the
`ModelIdentity.digest` of both sides is the one the artifact was fitted on.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Revision = Annotated[str, Field(pattern=r"^(commit:[0-9a-f]{40}|fingerprint:[0-9a-f]{64})$")]
Text = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        pattern="^[^\\x00-\\x1f\\x7f-\\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+$",
    ),
]
"""A line for people: no control characters, terminal escapes or changes of writing direction."""
Dtype = Literal["float32", "bfloat16", "float16"]

MOST = 1 << 53
"""No count in a record is more: what SQLite, PostgreSQL and readers of JSON take without loss."""
HIGHEST = 1e15
"""No measured number is further from zero: sums and squares of such numbers are finite."""
Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=-MOST, le=MOST)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Real = Annotated[float, Field(ge=-HIGHEST, le=HIGHEST)]
Strength = Annotated[float, Field(ge=0, le=1e300)]
"""Of a ridge."""
R2 = Annotated[float, Field(ge=-HIGHEST, le=1 + 1e-6)]
Cosine = Annotated[float, Field(ge=-1 - 1e-6, le=1 + 1e-6)]
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]
"""R2, cosine and share have room for rounding."""


class Record(BaseModel):
    """Frozen, closed and strict: unknown keys and coerced types are errors.

    Records are read from others, so every number in one has two bounds; a test looks at all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def within_bounds(value: float) -> float:
    """A number that was measured here, for a record: at most `HIGHEST` from zero; NaN stays NaN."""
    return max(min(float(value), HIGHEST), -HIGHEST)


def canonical_json(value: object) -> bytes:
    """The one byte form that digests are taken over: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class Geometry(Record):
    """Shape of the KV cache: `[num_layers, tokens, num_kv_heads, head_dim]`, K and V."""

    num_layers: int = Field(ge=1, le=1024)
    num_attention_heads: int = Field(ge=1, le=4096)
    num_kv_heads: int = Field(ge=1, le=1024)
    head_dim: int = Field(ge=2, le=1024)
    hidden_size: int = Field(ge=1, le=1 << 20)
    k_norm: bool
    """Whether a per-head norm acts on keys before RoPE (Qwen3). Keys are read after it."""

    @property
    def features(self) -> int:
        """Width of one layer's K (or V) row: `num_kv_heads * head_dim`."""
        return self.num_kv_heads * self.head_dim

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V over all layers for one token."""
        return 2 * self.num_layers * self.features * itemsize


class RopeSpec(Record):
    """The complete rotary embedding of a model.

    `inverse_frequencies` (radians a token, one per rotated pair) and
    `attention_factor` (multiplies cos and sin) define the angles;
    `parameters` is the model's own description, which the identity is taken over:
    the frequencies may differ in the last bit between machines and are compared
    numerically when a mapper is loaded.
    """

    rope_type: Text
    rotary_dim: int = Field(ge=2, le=1024)
    pairing: Literal["half", "interleaved"]
    """`half`: dimension i rotates with i + rotary_dim/2; `interleaved`: 2i with 2i + 1."""
    attention_factor: float = Field(gt=0, le=HIGHEST)
    inverse_frequencies: list[Real]
    parameters: dict[str, Real | Whole | str | bool | list[Real] | list[Whole] | None]
    max_position: Positive

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if 2 * len(self.inverse_frequencies) != self.rotary_dim:
            raise ValueError("RoPE needs one inverse frequency for each rotated pair")
        return self

    @property
    def limit(self) -> int | None:
        """Number of positions at which the angles depend on the position alone; None: all.

        Dynamic NTK and LongRoPE change their frequencies once a sequence grows past a length, so a key
        cached before then and one cached after are turned differently at the same position.
        """
        if self.rope_type == "dynamic":
            # One less than the length that transformers keeps: at it, a module that has seen a longer
            # sequence still uses that one's frequencies.
            return max(1, self.max_position - 1)
        if self.rope_type == "longrope" and self.parameters.get("short_factor") != self.parameters.get(
            "long_factor"
        ):
            original = self.parameters.get("original_max_position_embeddings")
            return original if isinstance(original, int) and original > 0 else 1
        return None

    @property
    def context(self) -> int:
        """The longest sequence to fit and evaluate on: `max_position`, or `limit` where that is less."""
        return min(self.max_position, self.limit or self.max_position)


class ModelIdentity(Record):
    """Everything that must be equal for KV rows to mean the same thing.

    `name` is a label for people and takes no part in `digest`.
    """

    name: Text = Field(max_length=256)
    revision: Revision
    architecture: Text = Field(max_length=128)
    dtype: Dtype
    geometry: Geometry
    rope: RopeSpec
    tokenizer: Sha256
    """sha256 over (id, token) pairs and special ids; padding of the vocabulary excluded."""
    chat_template: Sha256 | None
    """sha256 of the chat template; shown, but not part of `digest` (it is text, not KV)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rope.rotary_dim > self.geometry.head_dim:
            raise ValueError("RoPE cannot be wider than a head")
        return self

    @property  # not cached: model_copy would carry the old digest to changed fields
    def digest(self) -> str:
        """sha256 of the identity, hex."""
        value = self.model_dump(mode="json", exclude={"name", "chat_template"})
        del value["rope"]["inverse_frequencies"]
        # A logarithm may differ in its last bit between machines; the exact value is compared at load.
        value["rope"]["attention_factor"] = float(f"{self.rope.attention_factor:.6g}")
        return hashlib.sha256(canonical_json(value)).hexdigest()
