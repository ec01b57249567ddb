"""Ctrl-C: exit code 130 and one word, wherever Python or a library happens to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import os, signal, sys, time

sys.argv = ["kvhub", "list"]

def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)

def during(name):
    class Finder:
        def find_spec(self, found, path=None, target=None):
            if found == name:
                press()
    sys.meta_path.insert(0, Finder())

def command(does):
    import kvhub.cli.list
    kvhub.cli.list.command.callback = lambda **_: does()
"""
END = """
from kvhub.cli import main
main()
"""
MOMENTS = {
    "while the command line loads": "during('click')",
    "while a command loads": "during('kvhub.cli.list')",
    "in a command": "command(press)",
    "in an import that makes another error of it": """
def does():
    try:
        press()
    except KeyboardInterrupt:
        raise ImportError("SchemaError") from None
command(does)
""",
    "in an import of which we make an error": """
def does():
    from kvhub.errors import Corrupt
    try:
        press()
    except KeyboardInterrupt:
        raise Corrupt("the answer is none that the Hub gives") from None
command(does)
""",
    "in a text that is executed": "command(lambda: exec('press()'))",
    "in a destructor": """
class Last:
    def __del__(self):
        press()
def does():
    Last()
    time.sleep(5)
command(does)
""",
    "in a destructor, just before the end": """
class Last:
    def __del__(self):
        press()
command(lambda: Last() and None)
""",
    "when all is done": """
import atexit
def does():
    atexit.register(press)
command(does)
""",
    "while it is being said": """
import click
said = click.echo
def echo(*args, **more):
    press()
    said(*args, **more)
def does():
    click.echo = echo
    press()
command(does)
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c(shell, moment: str) -> None:  # type: ignore[no-untyped-def]
    code = BEGIN + MOMENTS[moment] + END
    done = subprocess.run(
        [sys.executable, "-c", code], env=shell.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "Interrupted", ""), moment


def test_when_python_takes_itself_apart_the_command_is_done(shell) -> None:  # type: ignore[no-untyped-def]
    last = "class Last:\n    def __del__(self, kill=os.kill, me=os.getpid()):\n        kill(me, 2)\n"
    code = BEGIN + last + "last = Last()\ncommand(lambda: None)" + END
    done = subprocess.run(
        [sys.executable, "-c", code], env=shell.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_who_ignores_it_still_does(shell) -> None:  # type: ignore[no-untyped-def]
    """As a shell has it for what runs in the background."""
    code = BEGIN + "signal.signal(signal.SIGINT, signal.SIG_IGN)\ncommand(press)" + END
    subprocess.run([sys.executable, "-c", code], env=shell.environment, check=True)
