"""A coding agent's conversation, written down: what the user says, what tools return, what a model would say.

`SCRIPT` is the whole of it; `upto` gives the messages before one of the assistant's turns, as a client sends
them to a chat endpoint (arguments of calls as JSON text).
"""

from __future__ import annotations

import copy
import json
from typing import Any

Message = dict[str, Any]

SYSTEM = (
    "You are a careful coding agent in a Python repository. Read before you change anything, run the tests "
    "after each change, and say in one sentence what you did."
)


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": [*properties]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("read_file", "Return the text of a file.", path="Path in the repository."),
    _tool(
        "edit_file", "Replace text in a file.", path="Path.", old="What is there.", new="What shall be there."
    ),
    _tool("run_tests", "Run the tests and return the end of their output.", path="A file or a folder."),
]

_FILE = '''"""Money with a currency."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Money:
    cents: int
    currency: str

    def __add__(self, other: "Money") -> "Money":
        return Money(self.cents + other.cents, self.currency)

    def __str__(self) -> str:
        return f"{self.cents / 100} {self.currency}"
'''

_TESTS = """tests/test_money.py ..F.                                                  [100%]

    def test_other_currency():
        with pytest.raises(ValueError):
>           Money(1, "EUR") + Money(1, "USD")
E           Failed: DID NOT RAISE <class 'ValueError'>

1 failed, 3 passed in 0.12s
"""


def _call(number: int, name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _said(text: str, *calls: Message, thinking: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text, "reasoning_content": thinking}
    return message | ({"tool_calls": [*calls]} if calls else {})


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


SCRIPT: list[Message] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Adding amounts of two currencies gives nonsense. Fix it in src/money.py."},
    _said(
        "",
        _call(1, "read_file", path="src/money.py"),
        thinking="The user wants an error for unequal currencies. I should read the file first.",
    ),
    _result(1, _FILE),
    _said(
        "The addition never looks at the currency. I run the tests before I change it.",
        _call(2, "run_tests", path="tests/test_money.py"),
        thinking="__add__ ignores other.currency. Let me see whether a test for it exists and fails.",
    ),
    _result(2, _TESTS),
    _said(
        "",
        _call(
            3,
            "edit_file",
            path="src/money.py",
            old='        return Money(self.cents + other.cents, self.currency)\n',
            new='        if other.currency != self.currency:\n'
            '            raise ValueError(f"cannot add {other.currency} to {self.currency}")\n'
            '        return Money(self.cents + other.cents, self.currency)\n',
        ),
        thinking="A test exists. Raise ValueError with both names, so that the message helps.",
    ),
    _result(3, "1 replacement in src/money.py"),
    _said(
        "Adding amounts of two currencies now raises ValueError; the test that expected it exists already.",
        thinking="The edit went through. I should tell the user and offer to run the tests again.",
    ),
    {"role": "user", "content": "Good. Now subtraction, the same way, and run all the tests."},
    _said(
        "",
        _call(
            4,
            "edit_file",
            path="src/money.py",
            old="    def __str__(self) -> str:",
            new='    def __sub__(self, other: "Money") -> "Money":\n'
            "        return self + Money(-other.cents, other.currency)\n\n"
            "    def __str__(self) -> str:",
        ),
        thinking="Subtraction can go through addition, which checks the currency.",
    ),
    _result(4, "1 replacement in src/money.py"),
    _said("", _call(5, "run_tests", path="tests"), thinking="Now all the tests."),
    _result(5, "tests/test_money.py ....                         [100%]\n\n4 passed in 0.09s\n"),
    _said(
        "Subtraction goes through addition and so refuses other currencies too; all four tests pass.",
        thinking="All pass. A test for subtraction is missing; the user may want one.",
    ),
    {"role": "user", "content": "Add a test for it."},
    _said(
        "",
        _call(6, "read_file", path="tests/test_money.py"),
        thinking="I need the style of the existing tests.",
    ),
]  # fmt: skip


def turns() -> list[int]:
    """Where the assistant speaks: indices into `SCRIPT`."""
    return [index for index, message in enumerate(SCRIPT) if message["role"] == "assistant"]


def upto(index: int) -> list[Message]:
    """The messages before one, as a client holds them."""
    return copy.deepcopy(SCRIPT[:index])
