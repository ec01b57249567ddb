"""`kvhub completion`: what a shell needs to complete kvhub's commands and mappers."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash   eval "$(kvhub completion bash)"       in ~/.bashrc
    zsh    eval "$(kvhub completion zsh)"        in ~/.zshrc
    fish   kvhub completion fish > ~/.config/fish/completions/kvhub.fish
    """
    root = context.find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    # The class may be asked for the script without bash being there to tell its version.
    completion = kind(root, {}, "kvhub", "_KVHUB_COMPLETE")
    click.echo(completion.source_template % completion.source_vars())
