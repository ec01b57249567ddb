"""The demo's two domains: Wikipedia (shipped) and source code (Python's own library, found here)."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

WIKIPEDIA = Path("demo/text/wikipedia.txt")
_SMALL, _LARGE = 8_000, 40_000


def write_code(path: Path) -> int:
    """Collect modules of the standard library as JSON lines; returns how many."""
    modules = []
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = module.read_text(encoding="utf-8", errors="replace")
        if _SMALL <= len(source) <= _LARGE:
            modules.append(json.dumps({"text": source}))
    path.write_text("\n".join(modules) + "\n", encoding="utf-8")
    return len(modules)


def stories(tokenizer: Any, root: Path, *, count: int, tokens: int) -> list[list[int]]:
    """Token ids of `count` articles that no fit has seen, `tokens` of each."""
    from kvhub.fit.text import read_documents, split_documents

    _, held_out = split_documents(read_documents([root / WIKIPEDIA]))
    encoded = (tokenizer(document, verbose=False)["input_ids"] for document in held_out)
    long_enough = [list(ids)[:tokens] for ids in encoded if len(ids) >= tokens]
    if len(long_enough) < count:
        raise SystemExit(
            f"the demo stops: {len(long_enough)} held-out articles of {tokens} tokens, not {count}"
        )
    return long_enough[:count]
