"""`kvhub gc`: delete what nothing keeps."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.numbers import Number
from kvhub.cli.output import Column
from kvhub.errors import KvhubError

COLUMNS = (
    Column("kind", "WHAT"),
    Column("name", "NAME"),
    Column("size", "SIZE", right=True),
    Column("why", "WHY"),
)


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--drafts", is_flag=True, help="Drafts go too, once they are older than the grace.")
@click.option("--unregistered", is_flag=True, help="Mappers that the registry does not name go too.")
@click.option(
    "--grace",
    type=Number(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Leave files alone that no mapper owns and that are younger: a fit may be about to register them. "
    "What a missing lock file named stays for so long, too.",
)
@click.option(
    "--fits",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="Progress of a fit that has not finished goes, once nothing was written to it for so long.",
)
@output.format_option("table", "json")
def command(dry_run: bool, drafts: bool, unregistered: bool, grace: float, fits: float, form: str) -> None:
    """Delete retired mappers, shards that no mapper has, and what killed processes and fits left.

    Kept in any case: a mapper with an alias, one that a lock file names, one
    that a running process has loaded, and the progress of a fit that runs. A
    mapper that the registry does not name is only listed (kvhub register puts
    it back), and so is what kvhub did not put there.
    """
    from kvhub.store.collect import collect

    done = collect(dry_run=dry_run, drafts=drafts, unregistered=unregistered, grace=grace, fits=fits)
    if form == "json":
        output.as_json(
            {
                "dry_run": dry_run,
                "size": done.size,
                "garbage": [
                    {"kind": item.kind, "path": str(item.path), "size": item.size, "why": item.why}
                    for item in done.garbage
                ],
                "kept": [{"digest": item.digest, "by": item.by} for item in done.kept],
                "unregistered": [{"path": str(item.path), "what": item.why} for item in done.unregistered],
                "foreign": [{"path": str(item.path), "why": item.why} for item in done.foreign],
                "absent_locks": [str(path) for path in done.absent],
                "disk_full": done.full,
            }
        )
        _demand_room(done.full)
        return
    if done.garbage:
        output.table(
            COLUMNS,
            [
                {
                    "kind": item.kind,
                    "name": output.clean(item.row.digest[:12] if item.row else item.path.name[:24]),
                    "size": output.size(item.size),
                    "why": output.clean(item.why),
                }
                for item in done.garbage
            ],
        )
    for item in done.kept:
        output.note(f"kept {item.digest[:12]}: {item.by}")
    for path in done.absent:
        output.note(f"lock file {path} is missing: what it named is kept for the grace, then forgotten")
    for stray in done.unregistered:
        output.note(f"not registered: {stray.path.name[:12]} ({stray.why})")
    if done.unregistered:
        output.note("kvhub register puts them back; kvhub gc --unregistered deletes them")
    for stray in done.foreign:
        output.note(f"left alone: {stray.path} ({stray.why})")
    verb = "would go" if dry_run else "deleted"
    output.note(f"{len(done.garbage)} {verb}, {output.size(done.size)}")
    _demand_room(done.full)


def _demand_room(stuck: list[str]) -> None:
    """Errors: `KvhubError` where mappers could not go, after all that could."""
    if stuck:
        names = ", ".join(digest[:12] for digest in stuck[:5]) + (", ..." if len(stuck) > 5 else "")
        raise KvhubError(
            f"the disk is full, and has no room to forget {len(stuck)} of them: {names}",
            "make room, then kvhub gc again; all else that could go has gone",
        )
