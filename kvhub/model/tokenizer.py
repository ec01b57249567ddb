"""The identity of a tokenizer: which token every id stands for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.errors import BadInput
from kvhub.model.identity import canonical_json
from kvhub.model.quiet import quietly
from kvhub.strict_json import shown

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def load_tokenizer(path: Path) -> Any:
    """The transformers tokenizer in `path`, from files alone. Errors: `BadInput`."""
    from transformers import AutoTokenizer

    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            len(tokenizer("a", truncation=False).input_ids)  # settings that it cannot work with show here
            return tokenizer
    except Exception as error:  # transformers and tokenizers raise many kinds for a bad file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{path} has no usable tokenizer: {shown(reason)}", "fetch the model again, with tokenizer.json"
        ) from error


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over every (id, token) in order of id, added tokens included, and the special ids.

    What pads the embedding beyond the vocabulary has no token and takes no part.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    special = {name: getattr(tokenizer, name, None) for name in SPECIAL}
    hasher = hashlib.sha256(canonical_json(special))
    for index, token in vocabulary:
        encoded = token.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:%d:" % (index, len(encoded)) + encoded)
    return hasher.hexdigest()


def chat_template_digest(tokenizer: Any) -> str | None:
    """sha256 of the chat template (of all named ones, where it has several), or None."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template.encode() if isinstance(template, str) else canonical_json(template)
    return hashlib.sha256(text).hexdigest()


def beyond(tokenizer: Any, rows: int) -> int:
    """How many tokens have an id that an embedding of `rows` rows has not."""
    return sum(index >= rows for index in tokenizer.get_vocab().values())


def demand_embedded(model: Any, tokens: Tensor) -> None:
    """Refuse (`BadInput`) token ids that the model's embedding has no row for.

    Vocabularies with a few such tokens are published (padding added after training), so that only text which
    has one is refused. model: transformers'.
    """
    rows = model.config.vocab_size
    if len(tokens) and int(tokens.max()) >= rows:
        raise BadInput(
            f"the text has token {int(tokens.max())}, and the model's embedding {rows} rows",
            "take the text of that token out: the tokenizer knows it, the model was not trained with it",
        )
