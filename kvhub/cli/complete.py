"""Argument types that the shell can complete from the registry."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class MapperType(click.ParamType[str]):
    """A reference to a mapper; completes aliases, then digests. Checked where it is used, not here."""

    name = "mapper"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that begin so; nothing where the registry cannot be read."""
        try:
            from kvhub.catalog import open_registry

            with open_registry(read_only=True) as registry:
                rows = registry.list()
        except Exception:  # a broken registry must not print into somebody's prompt
            return []
        at = "@" if incomplete.startswith("@") else ""
        found = [
            CompletionItem(value, help=f"{row.source.name} -> {row.target.name} ({row.state})")
            for row in rows
            for value in (*(at + name for name in row.aliases), row.digest[:12])
        ]
        return [item for item in found if str(item.value).startswith(incomplete)]


MAPPER = MapperType()
