"""Argument types that the shell can complete from the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from kvhub_registry.listing import Listed


class MapperType(click.ParamType[str]):
    """A reference to a mapper; completes aliases, then digests. Checked where it is used, not here."""

    name = "mapper"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that begin so; nothing where the registry cannot be read."""
        try:
            rows = _rows()
        except Exception:  # a broken registry must not print into somebody's prompt
            return []
        at = "@" if incomplete.startswith("@") else ""
        found = [
            CompletionItem(value, help=f"{row.source} -> {row.target} ({row.state})")
            for row in rows
            for value in (*(at + name for name in row.aliases), row.digest[:12])
        ]
        return [item for item in found if str(item.value).startswith(incomplete)]


def _rows() -> list[Listed]:
    """What is registered; makes no registry where there is none."""
    from kvhub.settings import Settings
    from kvhub_registry.listing import quick_list

    database = Settings.load().database_file
    found = quick_list(database) if database is not None else None
    if found is not None:
        return found
    from kvhub.catalog import open_registry
    from kvhub.cli.listed import of_row

    with open_registry(read_only=True) as registry:
        return [of_row(row) for row in registry.list()]


MAPPER = MapperType()
