"""`kvhub push`: publish a mapper."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER


@click.command()
@click.argument("mapper", type=MAPPER)
@click.argument("repository", metavar="ORG/NAME[/FOLDER]")
@click.option(
    "--path-in-repo",
    metavar="FOLDER",
    default="",
    help="The folder of a repository with several mappers; 'auto' names it by the pair.",
)
@click.option("--private", is_flag=True, help="Create the repository private.")
@click.option("--tag", metavar="TAG", help="Name this version (v1); a tag never moves.")
@click.option("--message", "-m", help="Title of the commit.")
@click.option(
    "--license", "licence", metavar="ID", help="Licence of the mapper (apache-2.0); else its card's stays."
)
@click.option("--allow-unevaluated", is_flag=True, help="Publish without passing evidence; the card says so.")
@click.option("--create-pr", is_flag=True, help="Propose it to a repository of somebody else.")
def command(
    mapper: str,
    repository: str,
    path_in_repo: str,
    private: bool,
    tag: str | None,
    message: str | None,
    licence: str | None,
    allow_unevaluated: bool,
    create_pr: bool,
) -> None:
    """Publish MAPPER as the Hub repository ORG/NAME, with a card generated from its scores.

    A repository holds one mapper at its root, or several in folders; in one
    whose mappers are all in folders, MAPPER gets a folder by its pair.

    Needs a token with write access: HF_TOKEN, or `hf auth login`.
    """
    from kvhub.catalog import directory_of
    from kvhub.hub.push import push

    with output.progress(f"pushing to {repository}") as progress:
        pushed = push(
            directory_of(mapper),
            repository,
            subfolder=path_in_repo,
            private=private,
            tag=tag,
            message=message,
            licence=licence,
            allow_unevaluated=allow_unevaluated,
            create_pr=create_pr,
            progress=progress,
        )
    version = f" ({pushed.tag})" if pushed.tag else ""
    click.echo(output.clean(f"{pushed.place}@{pushed.commit}{version}  {pushed.manifest.digest}"))
    if pushed.pull_request:
        click.echo(output.clean(pushed.pull_request))
    if pushed.licence is None:
        output.note("the card declares no licence; --license sets one, after a look at those of both models")
