"""`kvhub verify`: are a mapper's files what the manifest says?"""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.catalog import demote, directory_of, find
from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import Corrupt, NotFound


@click.command()
@click.argument("mapper", type=MAPPER)
@click.option("--deep", is_flag=True, help="Read every byte and compare sha256; else only names and sizes.")
def command(mapper: str, deep: bool) -> None:
    """Check a mapper's files: none missing, none extra, sizes, and with --deep every sha256.

    Shows who signed it, and refuses what the trust policy (kvhub trust) does not allow.

    MAPPER is a digest, an alias, 'source->target', or an artifact directory.
    A registered mapper that fails becomes a draft, so that nothing serves it.
    """
    from kvhub.artifact.evidence import read_evidence
    from kvhub.artifact.read import verify_artifact
    from kvhub.store.trust import demand

    directory = directory_of(mapper)
    expected = _registered(mapper, directory)
    try:
        manifest = verify_artifact(directory, deep=deep)
        if expected is not None and manifest.digest != expected:
            raise Corrupt(f"{directory} holds mapper {manifest.digest[:12]}, not {expected[:12]}")
        evidence = read_evidence(directory, manifest)
        origin = demand(directory, manifest)
    except Corrupt as error:
        if expected is not None and demote(expected, f"kvhub verify: {error.message}"):
            output.note(f"mapper {expected[:12]} is a draft now")
        raise Corrupt(
            error.message, error.hint or "kvhub rm removes it; kvhub pull fetches it again"
        ) from None
    how = "every sha256 agrees" if deep else "names and sizes agree (--deep compares every byte)"
    click.echo(f"{manifest.digest}  {len(manifest.files)} files, {output.size(manifest.size)}: {how}")
    click.echo(output.clean(str(origin)))
    if evidence is None:
        output.note("no evidence yet: kvhub eval measures it")


def _registered(mapper: str, directory: Path) -> str | None:
    """The digest that the registry knows these files by, if it does."""
    try:
        row = find(mapper)
    except NotFound:
        return None
    return row.digest if Path(row.path) == directory else None
