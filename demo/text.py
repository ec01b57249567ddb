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
    """`count` stretches of `tokens` token ids from articles that no fit has seen."""
    from kvhub.fit.text import read_documents, split_documents

    _, held_out = split_documents(read_documents([root / WIKIPEDIA]))
    found = []
    for document in held_out:
        ids = list(tokenizer(document, verbose=False)["input_ids"])
        found += [ids[i : i + tokens] for i in range(0, len(ids) - tokens + 1, tokens)]
    if len(found) < count:
        raise SystemExit(f"the demo stops: {len(found)} held-out stretches of {tokens} tokens, not {count}")
    return found[:count]
