"""`kvhub verify`: are a mapper's files what the manifest says?"""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.artifact.layout import EVIDENCE
from kvhub.catalog import demand_files, demote, files_of, find, local_directory
from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import Corrupt, Incompatible, NotFound
from kvhub_registry import MapperRow


@click.command()
@click.argument("mapper", type=MAPPER)
@click.option("--deep", is_flag=True, help="Read every byte and compare sha256; else only names and sizes.")
def command(mapper: str, deep: bool) -> None:
    """Check a mapper's files: none missing, none extra, sizes, and with --deep every sha256.

    Also its evidence: that it is of this digest, and what our gate says of it
    today; and its signature: valid, and allowed by the trust policy (kvhub
    trust). The signature covers the manifest and, through it, every listed file.
    README.md and assets/ are for people: nothing vouches for them.

    MAPPER is a digest, an alias, 'source->target', or an artifact directory.
    A registered mapper that fails becomes a draft, so that nothing serves it.
    """
    from kvhub.store.verify import verify

    directory, row = _look_up(mapper)
    try:
        found = verify(directory, row, deep=deep)
    except (Corrupt, Incompatible) as error:
        policy = isinstance(error, Incompatible) and error.code not in ("gate", "unevaluated")
        if row is not None and not policy and demote(row.digest, f"kvhub verify: {error.message}"):
            now = "is a draft now" if row.state.value == "ready" else f"stays {row.state.value}"
            output.note(f"mapper {row.digest[:12]} {now}")
        error.hint = error.hint or _way_out(row, evidence=error.message.startswith(EVIDENCE))
        raise
    manifest = found.manifest
    how = "every sha256 agrees" if deep else "names and sizes agree (--deep compares every byte)"
    click.echo(f"{manifest.digest}  {len(manifest.files)} files, {output.size(manifest.size)}: {how}")
    click.echo(output.clean(f"evidence: {found.evidence}"))
    click.echo(output.clean(f"origin: {found.provenance}"))
    if found.unread:
        click.echo(output.clean(f"not covered: {', '.join(found.unread)}"))
    for note in found.notes:
        output.note(note)


def _way_out(row: MapperRow | None, *, evidence: bool) -> str:
    """What repairs it: the Hub where it has the mapper, else what can be made again here."""
    ways = ["kvhub eval measures it again"] if evidence else []
    if row is not None and row.locations:
        place = row.locations[-1]
        ways.append(f"kvhub pull {place.repo_id}@{place.commit[:12]} fetches it again")
    elif row is not None and not evidence:
        ways.append("kvhub rm removes it; it was never on the Hub")
    return "; ".join(ways)


def _look_up(mapper: str) -> tuple[Path, MapperRow | None]:
    """Where the files are, and the row of these very files where the registry has one."""
    given = local_directory(mapper)
    try:
        row = find(mapper)
    except NotFound:
        if given is None:
            raise
        return given, None
    directory = given or demand_files(row)
    return directory, row if files_of(row) == directory else None
