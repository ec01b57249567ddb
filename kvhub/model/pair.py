"""Which two models may form a pair."""

from __future__ import annotations

from kvhub.errors import Incompatible
from kvhub.model.identity import ModelIdentity
from kvhub.model.rope import same_angles


def check_pair(source: ModelIdentity, target: ModelIdentity) -> None:
    """Refuse a pair whose caches cannot be mapped at all.

    Layers, heads, head sizes, RoPE and dtype may differ. Errors: `Incompatible(code="tokenizer")`.
    """
    if source.tokenizer != target.tokenizer:
        raise Incompatible(
            f"{source.name} and {target.name} have different vocabularies or special tokens",
            "a cache can only be mapped where every token id means the same to both models",
            code="tokenizer",
        )


def check_same(expected: ModelIdentity, found: ModelIdentity, *, code: str) -> None:
    """Refuse `found` where the mapper was fitted on `expected`; says what differs.

    Errors: `Incompatible` with the given code (`source_identity` or `target_identity`).
    """
    if expected.digest != found.digest:
        pairs = (
            (part, getattr(expected, part), getattr(found, part))
            for part in ("architecture", "geometry", "rope", "dtype", "tokenizer", "revision")
        )
        part, want, have = next(item for item in pairs if item[1] != item[2])
        detail = f" ({have} is not {want})" if isinstance(want, str) else ""
        raise Incompatible(
            f"the mapper was fitted for {expected.name} with another {part}{detail}",
            "use the exact model that the mapper names, or fit a mapper for this one",
            code=code,
        )
    if not same_angles(expected.rope, found.rope):
        raise Incompatible(f"{found.name} computes other RoPE frequencies than at the fit", code=code)
