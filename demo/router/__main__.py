"""A coding agent's conversation through a proxy that moves it between two model sizes.

    python -m demo.router [--small models/small] [--large models/large] [--template FILE]

Starts two servers with `kvhub serve` (mappers both ways must be registered: `kvhub fit SMALL LARGE
--both`) and the proxy of `demo.router.proxy`, and sends the scripted conversation of
`demo.router.agent`, turn by turn, to the chat endpoint with its tools. What the assistant says in the
history is the script's: the shipped models are too small to act. Printed for each turn: who answered, and
where its prompt's tokens came from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.server import ServerDied, free_port, running

from demo.__main__ import exchange
from demo.router.agent import SCRIPT, TOOLS, turns, upto
from demo.router.proxy import serving

ROOT = Path(__file__).parents[2]
COLUMNS = ("turn", "after", "model", "prompt", "exact", "mapped", "prefilled", "ms", "reason")


def ask(proxy: str, index: int, model: str) -> dict[str, Any]:
    """One turn through the chat endpoint; a row of the table."""
    body = {
        "model": model,
        "messages": upto(index),
        "tools": TOOLS,
        "max_tokens": 16,
        "temperature": 0,
        "return_meta_info": True,
    }
    request = urllib.request.Request(
        f"{proxy}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=1800) as answer:
        said, name = json.load(answer), answer.headers["X-Kvhub-Model"]
    seconds = time.perf_counter() - started
    meta = said["choices"][0].get("meta_info") or {}
    report = next((one for one in meta.get("kvhub") or [] if one), {})
    return {
        "after": SCRIPT[index - 1]["role"],
        "model": name,
        "prompt": said["usage"]["prompt_tokens"],
        **{key: report.get(key, "-") for key in ("exact", "mapped", "prefilled", "reason")},
        "ms": round(seconds * 1e3),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """An aligned table."""
    cells = [{key: str(row.get(key, "")) for key in COLUMNS} for row in rows]
    widths = {key: max(len(key), *(len(row[key]) for row in cells)) for key in COLUMNS}
    for row in ({key: key for key in COLUMNS}, *cells):
        print("  ".join(row[key].rjust(widths[key]) for key in COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", default="models/small")
    parser.add_argument("--large", default="models/large")
    parser.add_argument("--template", help="chat template of both servers, where the models have none")
    parser.add_argument("--turns", type=int, default=len(turns()))
    parser.add_argument("--logs", type=Path, default=Path(), help="folder for the servers' logs")
    arguments = parser.parse_args()
    template = arguments.template
    if template is None and arguments.small == "models/small":
        template = str(Path(__file__).parent / "templates" / "chatml.jinja")
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(exchange())
        started = {}
        for name, model, other in (
            ("small", arguments.small, arguments.large),
            ("large", arguments.large, arguments.small),
        ):
            port = free_port()
            command = [sys.executable, "-m", "kvhub", "serve", model, "--reuse-from", other, "--allow-draft"]
            command += ["--max-hops", "2", "--worth", "always"]
            command += ["--exchange", str(folder), "--port", str(port)]
            command += ["--", "--chat-template", template] if template else []
            print("$ " + " ".join(["kvhub", *command[3:]]) + " &", flush=True)
            log = arguments.logs / f"router-{name}.log"
            started[name] = stack.enter_context(
                running(command, environment, port=port, log=log, cwd=ROOT, wait=False)
            )
        for name, server in started.items():
            try:
                server.wait(900)
            except ServerDied as error:
                raise SystemExit(f"the demo stops: {name} did not start: {error}") from None
        proxy = stack.enter_context(serving({name: server.url for name, server in started.items()}))
        print(f"$ python -m demo.router.proxy small=... large=...   # {proxy}\n", flush=True)
        rows = []
        for number, index in enumerate(turns()[: arguments.turns], 1):
            rows.append({"turn": number, **ask(proxy, index, "auto")})
    show(rows)
    if not any(row["mapped"] not in ("-", 0) for row in rows):
        raise SystemExit("the demo failed: no turn was mapped")


if __name__ == "__main__":
    main()
