"""The command line: names and one-line helps here, each command in its own module, loaded when used.

Exit codes: 0 ok, 1 failure, 2 usage or input, 3 not found, 4 access, 5 network,
6 integrity, 7 incompatible, 130 Ctrl-C (`kvhub.errors`).
"""

from __future__ import annotations

import os
import sys

from kvhub import interrupt

if os.path.basename(sys.argv[0]) in ("kvhub", "-m"):  # noqa: PTH119 - the process is ours, from here on
    interrupt.watch()

import errno
import importlib
import io
import re
import traceback
import warnings
from typing import NoReturn

import click

from kvhub import __version__
from kvhub.errors import BadInput, KvhubError

COMMANDS = {
    "check": "Say whether a pair can work and what it costs.",
    "transfer": "Predict from a few hundred tokens whether a pair works.",
    "fit": "Fit a mapper from SOURCE to TARGET on a text.",
    "study": "Vary one thing of a fit and measure what it does.",
    "eval": "Measure a mapper on held-out text, and judge it.",
    "tasks": "Answer tasks on a mapped cache: accuracy kept.",
    "diagnose": "Measure where a mapper errs, and whether it matters.",
    "report": "Write one page that shows a mapper.",
    "list": "List registered mappers.",
    "matrix": "Show which pairs of a family have a mapper.",
    "plan": "Say what mappers between a set of models need.",
    "search": "Find mappers on the Hub, or here.",
    "info": "Show everything known of one mapper.",
    "diff": "Compare two mappers: selection, settings, scores.",
    "verify": "Check a mapper's files against its manifest.",
    "register": "Put mappers that are on disk back into the registry.",
    "promote": "Let a mapper serve, where it passes the gate.",
    "retire": "Take a mapper out of service.",
    "alias": "Name mappers; a name moves, a digest does not.",
    "rm": "Remove a mapper from the registry and from disk.",
    "gc": "Delete what nothing keeps any more.",
    "push": "Publish a mapper on the Hugging Face Hub.",
    "pull": "Fetch a mapper from the Hugging Face Hub.",
    "lock": "Pin mappers by repository, commit and digest.",
    "import": "Take over a mapper of another layout, as a draft.",
    "export": "Write a mapper in another layout.",
    "quantize": "Write a mapper with int8 weights, as another draft.",
    "sign": "Sign a mapper with an ed25519 key.",
    "trust": "Show or set whose mappers are taken.",
    "ui": "Show the registry in a browser, read-only.",
    "doctor": "Check settings, disk, registry, Hub and versions.",
    "completion": "Print the script that completes commands in a shell.",
    "top": "Watch what a live server reuses, maps and refuses.",
    "explain": "Say whether a server would map a history, and why.",
    "serve": "Serve a model with SGLang, reusing other models' caches.",
}

LONGEST = 400
"""Letters of a word in a message."""
MODULES = {"import": "import_"}
"""Modules that are not called like their command."""


class LazyGroup(click.Group):
    """Knows its commands by name; imports one only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a mapper's life."""
        return [*COMMANDS]  # not list(...): the submodule `list` takes that name here once it is loaded

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `kvhub.cli.<name>` and take its `command`."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kvhub.cli.{MODULES.get(cmd_name, cmd_name)}")
        command = module.command
        assert isinstance(command, click.Command)
        command.name = cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with its "Did you mean" over all our names."""
        try:
            found = super().resolve_command(ctx, args)
            if not ctx.resilient_parsing:
                interrupt.working()
            return found
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=COMMANDS, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    commands={},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kvhub")
def cli() -> None:
    """Map the KV cache of one model to another's: fit, judge, share and serve mappers.

    Data and registry are in KVHUB_HOME; KVHUB_DATABASE_URL puts the registry elsewhere.
    """


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: errors are two lines on stderr, never a traceback.

    KVHUB_DEBUG=1 shows the traceback as well, and what libraries warn of, as `python -W` does.
    """
    interrupt.watch()
    if not sys.warnoptions and os.environ.get("KVHUB_DEBUG") != "1":
        warnings.simplefilter("ignore")  # of libraries: kvhub itself speaks through notes and errors
    code = run(argv)
    interrupt.through()
    sys.exit(code)


def run(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        _demand_text(sys.argv[1:] if argv is None else argv)
        code = cli.main(args=argv, prog_name="kvhub", standalone_mode=False)
        sys.stdout.flush()
        if interrupt.lost():
            return _interrupted_now()
        return code if isinstance(code, int) else 0
    except KvhubError as error:
        if interrupt.seen():  # of a client that could not be imported, say
            return _interrupted_now()
        return _fail(error.message, error.hint, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _debug()
        return _interrupted_now()
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(file=shown)
        click.echo(_short(shown.getvalue()), nl=False, err=True)
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`kvhub list | head`): nothing to report, nothing to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PermissionError as error:
        return _fail(
            f"{error.filename or 'a file'} may not be written", "check who owns it, or set KVHUB_HOME", 4
        )
    except Exception as error:  # the last line of defence: no user sees a traceback
        if interrupt.seen() or _interrupted(error):  # libraries make errors of their own of it
            _debug()
            return _interrupted_now()
        from kvhub.cli import output
        from kvhub.files import is_full

        if is_full(error):  # in a library, which writes where it likes
            return _fail("the disk is full", "free some space, or set KVHUB_HOME or HF_HOME elsewhere", 1)
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            where = f"{error.filename or 'a file'} is on a disk that is read-only"
            return _fail(where, "set KVHUB_HOME or HF_HOME elsewhere", 4)

        known = _registry_error(error) or _surroundings(error)
        if known is not None:
            return _fail(known.message, known.hint, known.exit_code)
        detail = output.clean(str(error)).strip()
        what = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
        return _fail(what[:500], "this is a bug in kvhub; set KVHUB_DEBUG=1 to see where", 1)


def _interrupted_now() -> int:
    interrupt.through()  # all is cleaned up: once more, and the process ends
    click.echo("Interrupted", err=True)
    return interrupt.CODE


def _interrupted(error: BaseException | None) -> bool:
    """Whether a Ctrl-C is what an error goes back to."""
    seen = 0
    while error is not None and seen < 50:
        if isinstance(error, KeyboardInterrupt):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _fail(message: str, hint: str, code: int) -> int:
    from kvhub.cli import output

    _debug()
    click.echo(f"Error: {output.clean(_short(message))}", err=True)
    if hint:
        click.echo(f"Hint: {output.clean(_short(hint))}", err=True)
    return code


def _short(text: str) -> str:
    """Without the middle of words that are longer than any name: somebody's argument, given back."""
    text = re.sub(
        rf"\S{{{LONGEST + 1},}}", lambda word: f"{word[0][: LONGEST // 2]}...{word[0][-LONGEST // 4 :]}", text
    )
    return text if len(text) <= 10 * LONGEST else f"{text[: 10 * LONGEST]}..."


def _debug() -> None:
    if os.environ.get("KVHUB_DEBUG") == "1":
        traceback.print_exc()


def _demand_text(arguments: list[str]) -> None:
    """Refuse (`BadInput`) arguments that no name and no file of ours can have."""
    for text in arguments:
        try:
            text.encode()
        except UnicodeEncodeError:
            plain = text.encode("ascii", "replace").decode()
            raise BadInput(f"{plain[:160]!r} is not text in UTF-8", "check the arguments") from None


def _surroundings(error: Exception) -> KvhubError | None:
    """What the environment, and no fault of ours, has made of a library."""
    from kvhub.settings import demand_endpoint

    try:
        demand_endpoint()  # an address that is none lets the import of the Hub's client fail
    except BadInput as found:
        return found
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return BadInput("a name or a path is not text in UTF-8", "check KVHUB_HOME, and files and folders")
    return None


def _registry_error(error: Exception) -> KvhubError | None:
    if "kvhub_registry" not in sys.modules:
        return None
    from kvhub.catalog import as_kvhub_error
    from kvhub_registry import RegistryError

    return as_kvhub_error(error) if isinstance(error, RegistryError) else None
