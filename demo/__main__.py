"""`make demo`: fit, judge, publish, fetch, and serve a conversation that switches models."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.shell import ROOT, Shell

sys.path.insert(0, str(ROOT / "tests"))  # the real server and the loopback Hub, which tests share

from support.server import Server, ServerDied, free_port, running

from demo import conversation, report, text
from demo.loopback_hub import USER, LoopbackHub

WORK = Path(".kvhub/demo")
A, B = "models/small", "models/large"
CONVERSATIONS = 5
"""After one rehearsal, which is not counted."""


def main() -> None:
    """The demo, from fitting to the report."""
    shell = Shell()
    shutil.rmtree(ROOT / WORK, ignore_errors=True)
    (ROOT / WORK).mkdir(parents=True)
    fit_and_judge(shell)
    publish_and_fetch(shell)
    serve(shell)


def fit_and_judge(shell: Shell) -> None:
    """Step 1: both mappers, registered, with evidence."""
    shell.heading("1. Fit both directions, and judge them on text that no fit has seen")
    code = WORK / "code.jsonl"
    modules = text.write_code(ROOT / code)
    shell.say(f"{code}: {modules} modules of Python's standard library")
    domains = ("--text", str(text.WIKIPEDIA), "--text", str(code))
    shell.export({"KVHUB_HOME": str(WORK / "home"), "OMP_NUM_THREADS": "1"})
    pair = (A, B, "--both", "--dtype", "float32")
    size = ("--k", "6", "--sequences", "160", "--length", "256", "--stride", "2", "--distill", "0")
    shell.run("kvhub", "fit", *pair, *size, *domains)
    for mapper in mappers(shell):
        sides = [f"models/{mapper[side]}" for side in ("source", "target")]
        shell.run(
            "kvhub", "eval", mapper["digest"][:12], "--source", sides[0], "--target", sides[1],
            "--windows", "16", *domains,
        )  # fmt: skip
    shell.run("kvhub", "list")


def publish_and_fetch(shell: Shell) -> None:
    """Step 2: through a Hub, into a home that knew nothing."""
    with hub(shell):
        shell.heading("2. Publish both, and fetch them into an empty home")
        repositories = []
        for mapper in mappers(shell):
            repositories.append(f"{USER}/kvhub-{mapper['source']}-to-{mapper['target']}")
            command = ["kvhub", "push", mapper["digest"][:12], repositories[-1], "--license", "apache-2.0"]
            if mapper["state"] != "ready":
                shell.say("it did not pass the gate: published by override, and its card says so")
                command.append("--allow-unevaluated")
            shell.run(*command)
        shell.export({"KVHUB_HOME": str(WORK / "empty")})
        for repository in repositories:
            shell.run("kvhub", "pull", repository)
        shell.run("kvhub", "list")


def serve(shell: Shell) -> None:
    """Steps 3 and 4: two servers, the conversations, the report."""
    fetched = mappers(shell)
    drafts = [mapper["digest"][:12] for mapper in fetched if mapper["state"] != "ready"]
    with exchange() as folder, servers(shell, folder, draft=bool(drafts)) as running_servers:
        shell.heading("4. One conversation that switches A -> B -> A, then the same without kvhub")
        turns = converse(running_servers)
    print()
    report.show(turns, CONVERSATIONS, drafts)
    report.write(ROOT / "demo-report.json", turns, CONVERSATIONS, fetched)
    shell.heading("Done: demo-report.json")
    if not all(turn.mapped_in == CONVERSATIONS for turn in turns[1:]):
        raise SystemExit("the demo failed: a turn after a switch was not mapped every time")


def mappers(shell: Shell) -> list[dict[str, Any]]:
    """What `kvhub list` knows, small -> large first."""
    found = json.loads(shell.ask("kvhub", "list", "--format", "json"))
    return sorted(found, key=lambda mapper: mapper["source"] != "small")


@contextlib.contextmanager
def hub(shell: Shell) -> Iterator[None]:
    """A Hub on the loopback interface, to which the real client is pointed by its own variables."""
    with LoopbackHub(ROOT / WORK / "hub").serve() as server:
        shell.export({**server.environment, "HF_HOME": str(ROOT / WORK / "hf")}, shown=False)
        shell.export({"HF_ENDPOINT": server.url})
        yield


@contextlib.contextmanager
def exchange() -> Iterator[Path]:
    """An empty directory that both servers share: in memory where there is a tmpfs."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else ROOT / WORK
    folder = Path(tempfile.mkdtemp(prefix="kvhub-demo-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def servers(shell: Shell, folder: Path, *, draft: bool) -> Iterator[dict[str, Server]]:
    """Both servers, started at once, each able to map from the other."""
    shell.heading("3. Start two SGLang servers that share an exchange")
    if draft:
        shell.say(
            "a mapper did not pass the gate: --allow-draft serves it all the same, and every answer says so"
        )
    shell.export({"HF_HUB_OFFLINE": "1"}, shown=False)
    with contextlib.ExitStack() as stack:
        started = {}
        for model, other in ((A, B), (B, A)):
            name, port = Path(model).name, free_port()
            command = ["kvhub", "serve", model, "--reuse-from", other, "--exchange", str(folder)]
            command += ["--max-hops", str(conversation.MAX_HOPS), "--worth", "always", "--port", str(port)]
            command += ["--stage-wait-ms", "10000", "--publish-wait-ms", "2000"]  # whatever the machine
            command += ["--allow-draft"] if draft else []
            print(f"$ {' '.join(command)} &", flush=True)
            log = ROOT / WORK / f"{name}.log"
            started[name] = stack.enter_context(
                running(command, shell.environment, port=port, log=log, cwd=ROOT, wait=False)
            )
        for name, server in started.items():
            try:
                server.wait()
            except ServerDied as error:
                raise SystemExit(f"the demo stops: {name} did not start: {error}") from None
        yield started


def converse(running_servers: dict[str, Server]) -> list[conversation.Turn]:
    """Hold the conversations, the first as a rehearsal."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / A)
    count, tokens = CONVERSATIONS + 1, conversation.story_tokens()
    rehearsal, *counted = text.stories(tokenizer, ROOT, count=count, tokens=tokens)
    conversation.hold(running_servers, [rehearsal])
    return conversation.hold(running_servers, counted)


if __name__ == "__main__":
    main()
