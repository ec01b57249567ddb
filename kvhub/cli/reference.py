"""docs/cli.md, from the commands themselves: `python -m kvhub.cli.reference > docs/cli.md`."""

from __future__ import annotations

import inspect

import click

from kvhub.cli import COMMANDS, cli

HEAD = """# Commands

<!-- Made by `python -m kvhub.cli.reference > docs/cli.md`; a test compares. -->

Data goes to stdout, notes and errors to stderr. Exit codes: 0 ok, 1 failure, 2 usage or input, 3 not found,
4 access, 5 network, 6 integrity, 7 incompatible, 130 Ctrl-C. `KVHUB_DEBUG=1` shows tracebacks.

A MAPPER is a digest or its first six digits or more, an alias (`@prod`), a repository pulled before
(`org/name`), or `source->target`. Output for programs (`--format json`) has bytes, ISO 8601 dates and numbers
as numbers.
"""


def reference() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="kvhub")
    parts = [HEAD, "\n".join(f"- [`kvhub {name}`](#kvhub-{name}): {text}" for name, text in COMMANDS.items())]
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts.append(_section(name, command, click.Context(command, info_name=name, parent=context)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(name: str, command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## kvhub {name}", "", f"    kvhub {name} {usage}", "", _prose(command.help or "")]
    rows = [
        record
        for parameter in command.get_params(context)
        if "--help" not in parameter.opts
        and not getattr(parameter, "hidden", False)
        and (record := parameter.get_help_record(context))
        and record[1]
    ]
    if rows:
        lines += ["", "| option | |", "|---|---|"]
        lines += [f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Help text as Markdown: paragraphs flow, a block after click's backspace stays as it is."""
    parts = []
    for part in inspect.cleandoc(text).split("\n\n"):
        kept = part.removeprefix("\b\n")
        parts.append("    " + kept.replace("\n", "\n    ") if kept != part else " ".join(part.split()))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
