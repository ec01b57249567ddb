"""Turn a WikiText file back into running text: how demo/text/wikipedia.txt was made.

    python tools/detokenize_wikitext.py wiki.valid.tokens demo/text/wikipedia.txt

WikiText stores tokens apart (` , `, ` @-@ `, `" word "`), which no model has read in
training. Articles are separated by two blank lines, paragraphs by one, and wrapped
nowhere. `<unk>`, WikiText's mark for rare words, stays.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ARTICLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)
_JOINED = (
    (r" @(.)@ ", r"\1"),
    (r" ([,.;:!?%)\]}])", r"\1"),
    (r"([(\[{$£]) ", r"\1"),
    (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
    (r'" ([^"\n]*?) "', r'"\1"'),
    (r"' ([^'\n]*?) '", r"'\1'"),
    (r"s ' ", "s' "),
    (r" / ", "/"),
)


def detokenize(text: str) -> str:
    """One article, spaces put back where a reader expects them."""
    for pattern, replacement in _JOINED:
        text = re.sub(pattern, replacement, text)
    lines = [re.sub(r"^(= )+|( =)+$", "", line.strip()) for line in text.splitlines()]
    return "\n\n".join(line for line in lines if line)


def articles(text: str) -> list[str]:
    """The articles of a WikiText file, heading first."""
    starts = [match.start() for match in _ARTICLE.finditer(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def main() -> None:
    """Read argv[1], write argv[2]."""
    source, target = (Path(argument) for argument in sys.argv[1:3])
    found = articles(source.read_text(encoding="utf-8"))
    target.write_text("\n\n\n".join(map(detokenize, found)) + "\n", encoding="utf-8")
    print(f"{target}: {len(found)} articles, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
