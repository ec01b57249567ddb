"""How much of what a server holds after a turn is still the beginning of the next turn's prompt.

    python -m demo.router.survival TOKENIZER [--template NAME=FILE]... [--format table|json]

A server's rows are those of the tokens it was given and generated. The next request of a chat endpoint
brings messages, which the template renders anew: what is dropped, moved or written otherwise ends the common
prefix there, for SGLang's own cache and for kvhub alike. Each assistant turn of the scripted conversation is
taken as generated the way the template asks for it (thinking first, then text, then calls).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from demo.router.agent import SCRIPT, TOOLS, Message, turns, upto

BLOCK = 64
TEMPLATES = Path(__file__).parent / "templates"

Render = Callable[[list[Message], bool], str]


@dataclass(frozen=True)
class Turn:
    """After one assistant turn: tokens held, tokens of the next prompt, and how many begin both."""

    held: int
    prompt: int
    common: int
    after: str
    """Who speaks next: `user` or `tool`."""

    @property
    def usable(self) -> int:
        """Whole blocks of the exchange inside the common prefix."""
        return self.common // BLOCK * BLOCK


def renderer(template: str, **options: Any) -> Render:
    """A template as the chat endpoint applies it: `render(messages, add_generation_prompt)`."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    environment.globals["raise_exception"] = _refuse
    compiled: jinja2.Template = environment.from_string(template)

    def render(messages: list[Message], generation: bool) -> str:
        return compiled.render(
            messages=[_parsed(m) for m in messages], tools=TOOLS, add_generation_prompt=generation, **options
        )

    return render


def _refuse(message: str) -> None:
    raise ValueError(message)


def _parsed(message: Message) -> Message:
    """As SGLang's endpoint hands messages to a template: arguments as an object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def generated(render: Render, plain: Render, index: int, *, thinking: bool, returned: bool) -> str:
    """What the server holds after the turn at `index`: its prompt, and the answer as the model writes it.

    plain: the same template with a generation prompt that is the header alone.
    """
    history = _history(index, thinking and returned)
    [answer] = _history(index + 1, thinking)[-1:]
    head = plain(history, True)
    whole = plain([*history, answer], False)  # as the last message, its thinking is shown
    if not whole.startswith(head):
        raise ValueError("the template renders an answer otherwise than its own generation prompt begins it")
    # The newline behind the end of a turn is the template's, not the model's.
    return render(history, True) + whole[len(head) :].rstrip("\n")


def _history(index: int, thinking: bool) -> list[Message]:
    """The messages before one; of a model that does not think, without thinking."""
    return [
        m if thinking or "reasoning_content" not in m else {**m, "reasoning_content": ""} for m in upto(index)
    ]


def survival(
    template: str,
    encode: Callable[[str], Sequence[int]],
    *,
    thinking: bool = True,
    returned: bool = True,
    **options: Any,
) -> list[Turn]:
    """One `Turn` for each assistant turn that another request follows.

    thinking: whether the model thinks; returned: whether the client sends thinking back with the
    history; options: further variables of the template.
    """
    render = renderer(template, **options)
    plain = renderer(template, **{k: v for k, v in options.items() if k != "enable_thinking"})
    found = []
    for index, after in itertools.pairwise(turns()):
        held = encode(generated(render, plain, index, thinking=thinking, returned=returned))
        prompt = encode(render(_history(after, thinking and returned), True))
        common = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b),
            min(len(held), len(prompt)),
        )
        found.append(Turn(len(held), len(prompt), common, SCRIPT[index + 1]["role"]))
    return found


def summary(found: list[Turn]) -> dict[str, Any]:
    """Shares over all turns, and apart for those before a user's message and inside a chain of tool calls."""

    def share(chosen: list[Turn]) -> float | None:
        held = sum(turn.held for turn in chosen)
        return round(sum(turn.common for turn in chosen) / held, 4) if held else None

    return {
        "survives": share(found),
        "before_a_user_message": share([turn for turn in found if turn.after == "user"]),
        "inside_tool_calls": share([turn for turn in found if turn.after == "tool"]),
        "blocks_of_the_next_prompt": round(
            sum(turn.usable for turn in found) / sum(turn.prompt for turn in found), 4
        ),
        "turns": [vars(turn) for turn in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", help="a model directory or a tokenizer's name")
    parser.add_argument("--template", action="append", default=[], metavar="NAME=FILE", help="repeatable")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    named = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
    named |= {name: Path(file) for name, _, file in (each.partition("=") for each in arguments.template)}
    result = {}
    for name, path in named.items():
        text = path.read_text()
        thinks = "think" in text
        result[name] = summary(survival(text, encode, thinking=thinks))
        if thinks:
            result[f"{name}, thinking kept"] = summary(survival(text, encode, keep_thinking=True))
            result[f"{name}, not sent back"] = summary(survival(text, encode, returned=False))
            result[f"{name}, thinking off"] = summary(
                survival(text, encode, thinking=False, enable_thinking=False)
            )
    if arguments.format == "json":
        print(json.dumps(result, indent=1))
        return
    print(f"{'template':<34}{'survives':>9}{'tool chain':>12}{'next user':>11}{'whole blocks':>14}")
    for name, row in result.items():
        cells = [row[key] for key in ("survives", "inside_tool_calls", "before_a_user_message")]
        cells.append(row["blocks_of_the_next_prompt"])
        print(
            f"{name:<34}"
            + "".join(
                f"{'-' if c is None else f'{c:.1%}':>{w}}"
                for c, w in zip(cells, (9, 12, 11, 14), strict=True)
            )
        )


if __name__ == "__main__":
    main()
