"""A conversation between two servers on two hosts, blocks over Mooncake; results/mooncake.json.

    python -m benchmarks.mooncake --home HOME        (as root: it makes network namespaces)

Needs `kvhub[mooncake]` and iproute2. Four hosts, each a network namespace with an address
of its own behind one switch: the store (master and an owner of memory), a server of
`small`, a server of `large`, and this script as the router. Nothing is shared but the
network. The blocks are signed with a secret that the two servers have and the store has not.

Recorded: conversations whose turns alternate between the servers (tokens mapped and exact,
milliseconds waited); exact answers against native ones after the target's cache was
flushed; pages overwritten in the store by somebody without the secret; the master stopped
for a while, then killed; bytes over the wire; the cost of one block, for the shipped pair's
and for one of 16 MiB (64 tokens of Qwen3-32B). Times are of namespaces on one machine: the
wire is memory, and both ends share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support import mooncake
from support.server import Server

from benchmarks import machine, servers
from kvhub.exchange import Layout, Lineage, Namespace, chain_keys
from kvhub.exchange.block import encode
from kvhub_sglang.serving import layout_of

HOSTS = {"store": "10.77.0.1", "small": "10.77.0.2", "large": "10.77.0.3", "router": "10.77.0.9"}
PORT, RPC = 30000, 50051
NEW_TOKENS = 24


# ---- the hosts


@contextlib.contextmanager
def hosts(prefix: str) -> Iterator[None]:
    """Namespaces `<prefix>-<host>` on one bridge, which is in a namespace of its own; removed at the end."""
    switch = f"{prefix}-switch"
    names = [switch, *(f"{prefix}-{host}" for host in HOSTS)]
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, (host, address) in enumerate(HOSTS.items()):
            name, port = f"{prefix}-{host}", f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", port, "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def on(prefix: str, host: str, command: list[str]) -> list[str]:
    """`command`, run on a host."""
    return ["ip", "netns", "exec", f"{prefix}-{host}", *command]


def wire_bytes(prefix: str, host: str) -> int:
    """Bytes that a host sent and received."""
    command = ["cat", *(f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("rx", "tx"))]
    done = subprocess.run(on(prefix, host, command), check=True, capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


# ---- what runs on them


@contextlib.contextmanager
def store(prefix: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Master and owner of memory on the store's host; yields the master."""
    address = HOSTS["store"]
    with contextlib.ExitStack() as stack:

        def start(name: str, port: int, *flags: str) -> subprocess.Popen[bytes]:
            where, through = (address, port), on(prefix, "store", [])
            return mooncake.start(stack, folder, name, where, *flags, through=through, seconds=60)

        master = start(
            "mooncake_master",
            RPC,
            f"--rpc_address={address}",
            f"--rpc_port={RPC}",
            "--metrics_port=9003",
            "--client_ttl=300",  # a starved owner of memory is not taken for a dead one
        )
        start(
            "mooncake_client",
            50052,
            f"--host={address}",
            "--port=50052",
            "--global_segment_size=512MB",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={address}:{RPC}",
        )
        yield master


def serve(stack: contextlib.ExitStack, prefix: str, name: str, home: str, url: str, folder: Path) -> Server:
    """`name` with kvhub on its host; not waited for."""
    return servers.start(
        stack,
        name,
        home,
        url,
        settings={"lineage_mappers": [], "stage_wait_ms": 5000},  # one hop
        flags=["--max-total-tokens", "8192"],
        log=folder / f"{name}.log",
        host=HOSTS[name],
        port=PORT,
        through=on(prefix, name, []),
    )


def ask(server: Server, prompt: list[int], tenant: str, *, reuse: bool = False) -> dict[str, Any]:
    """Greedy answer, milliseconds, and kvhub's report."""
    extra = {"kv_hints": servers.hints()} if reuse else {}
    started = time.perf_counter()
    answer = server.generate(prompt, NEW_TOKENS, cache_salt=tenant, **extra)
    report = servers.report(answer)
    kept = ("exact", "mapped", "prefilled", "reason", "detail", "waited_ms", "staged_ms")
    return {
        "ids": answer["output_ids"],
        "request_ms": (time.perf_counter() - started) * 1e3,
        **{key: report.get(key) for key in kept},
    }


class Watcher:
    """Somebody else at the store, without the servers' secret: sees what is there."""

    def __init__(self, exchange: Any) -> None:
        from kvhub.model.identify import identify

        self.exchange = exchange
        self.models = {
            name: identify(servers.ROOT / "models" / name, dtype="float32") for name in ("small", "large")
        }

    def pages(self, model: str, prompt: list[int], tenant: str, kind: str = "exact") -> list[bytes]:
        """Keys of the prompt's full blocks."""
        return chain_keys(Namespace(self.models[model].digest, kind, (tenant, "")), prompt)  # type: ignore[arg-type]

    def published(self, model: str, prompt: list[int], tenant: str, seconds: float = 60) -> bool:
        """Whether the last full block of `prompt` got there; blocks are published behind the answer."""
        deadline = time.monotonic() + seconds
        names = [f"kvhub:{self.pages(model, prompt, tenant, kind)[-1].hex()}" for kind in ("exact", "lossy")]
        while not any(self.exchange._client.is_exist(name) == 1 for name in names):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


# ---- what is recorded


def conversations(
    small: Server, large: Server, watcher: Watcher, texts: list[list[int]]
) -> list[list[dict[str, Any]]]:
    """Six turns each, every one on the other server, each with 70 new tokens of the user's."""
    found = []
    for number, text in enumerate(texts):
        history, turns = list(text[:200]), []
        for turn in range(6):
            server = (small, large)[turn % 2]
            answer = ask(server, history, f"talk-{number}", reuse=True)
            name = ("small", "large")[turn % 2]
            turns.append({"on": name, "prompt": len(history), **answer})
            turns[-1].pop("ids")
            turns[-1]["published"] = watcher.published(name, history, f"talk-{number}")
            history += answer["ids"] + text[200 + 70 * turn : 270 + 70 * turn]
        found.append(turns)
    return found


def exact_answers(large: Server, watcher: Watcher, prompts: list[list[int]], tenant: str) -> dict[str, Any]:
    """Native, flushed, and again with reuse: own blocks come back over the network."""
    wrong, reused, waited = 0, [], []
    native = [ask(large, prompt, tenant)["ids"] for prompt in prompts]
    published = sum(watcher.published("large", prompt, tenant) for prompt in prompts)
    large.flush()
    for prompt, expected in zip(prompts, native, strict=True):
        again = ask(large, prompt, tenant, reuse=True)
        wrong += again["ids"] != expected
        reused.append(again["exact"])
        waited.append(again["waited_ms"])
    return {
        "requests": len(prompts),
        "published": published,
        "wrong": wrong,
        "exact": reused,
        "waited_ms": waited,
    }


def hostile(large: Server, watcher: Watcher, prompts: list[list[int]]) -> dict[str, Any]:
    """Somebody without the secret overwrites every page: with noise, and with a block of its own making."""
    client, model = watcher.exchange._client, watcher.models["large"]
    layout = layout_of(model)
    native = [ask(large, prompt, "hostile")["ids"] for prompt in prompts]
    published = sum(watcher.published("large", prompt, "hostile") for prompt in prompts)
    large.flush()
    pages, exact = 0, Lineage(hops=0, mappers=[])
    for prompt in prompts:
        for index, key in enumerate(watcher.pages("large", prompt, "hostile")):
            forged = encode(key, model.digest, 64 * index, layout, exact, torch.zeros(layout.shape))
            page = forged if pages % 2 else secrets.token_bytes(len(forged))
            assert client.upsert(f"kvhub:{key.hex()}", page) == 0
            pages += 1
    answers = [ask(large, prompt, "hostile", reuse=True) for prompt in prompts]
    wrong = sum(a["ids"] != e for a, e in zip(answers, native, strict=True))
    return {"pages": pages, "published": published, "wrong": wrong, "exact": [a["exact"] for a in answers]}


def outage(
    large: Server, watcher: Watcher, master: subprocess.Popen[bytes], prompts: list[list[int]]
) -> dict[str, Any]:
    """The master hangs for a while, answers again, then dies; the target is asked throughout."""
    native = [ask(large, prompt, "outage")["ids"] for prompt in prompts]
    for prompt in prompts:
        watcher.published("large", prompt, "outage")
    found: dict[str, Any] = {"wrong": 0}

    def phase(name: str) -> None:
        large.flush()
        rows = []
        for prompt, expected in zip(prompts, native, strict=True):
            answer = ask(large, prompt, "outage", reuse=True)
            found["wrong"] += answer["ids"] != expected
            rows.append({k: answer[k] for k in ("exact", "reason", "detail", "request_ms", "waited_ms")})
        found[name] = rows

    phase("before")
    os.kill(master.pid, signal.SIGSTOP)
    phase("hanging")
    os.kill(master.pid, signal.SIGCONT)
    time.sleep(12)  # the breaker closes
    phase("back")
    os.kill(master.pid, signal.SIGKILL)
    phase("dead")
    return found


def block_cost(exchange: Any, layout: Layout, count: int) -> dict[str, Any]:
    """Milliseconds of each call for blocks of one layout, one after another."""
    rows = torch.randn(layout.shape).to(getattr(torch, layout.dtype))
    keys = [secrets.token_bytes(32) for _ in range(count)]
    exact = Lineage(hops=0, mappers=[])

    def timed(call: Callable[[bytes], Any]) -> list[float]:
        times = []
        for key in keys:
            started = time.perf_counter()
            call(key)
            times.append((time.perf_counter() - started) * 1e3)
        return times

    put = timed(
        lambda key: exchange.put(key, model="a" * 64, position=0, layout=layout, lineage=exact, payload=rows)
    )
    header = timed(exchange.header)
    get = timed(lambda key: exchange.get(key, model="a" * 64, layout=layout))
    started = time.perf_counter()
    exchange.headers(keys)
    together = (time.perf_counter() - started) * 1e3 / count
    megabytes = layout.nbytes / 1e6
    return {
        "megabytes": megabytes,
        "blocks": count,
        "put_ms": statistics.median(put),
        "get_ms": statistics.median(get),
        "header_ms": statistics.median(header),
        "headers_together_ms": together,
        "get_mb_per_s": megabytes / statistics.median(get) * 1e3,
        "note": "get and put include sha256 over the block and its copy",
    }


def inside(prefix: str, home: str, talks: int) -> None:
    """On the router's host."""
    from kvhub.exchange.mooncake import open_mooncake

    ids = servers.token_ids(slice(20000, 90000))
    texts = [ids[i * 700 : (i + 1) * 700] for i in range(20)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhub-mooncake-")))
        key = folder / "secret"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(32))
        url = f"mooncake://{HOSTS['store']}:{RPC}"
        master = stack.enter_context(store(prefix, folder))
        live = {
            name: serve(stack, prefix, name, home, f"{url}?secret={key}", folder)
            for name in ("small", "large")
        }
        for server in live.values():
            server.wait(servers.PATIENCE)
            log = server.log.read_text(errors="replace")
            assert "kvhub serves" in log, log[-3000:]
        small, large = live["small"], live["large"]
        result: dict[str, Any] = {"machine": machine.describe(), "hosts": len(HOSTS)}
        watcher = Watcher(open_mooncake(f"{url}?local={HOSTS['router']}"))
        before = {host: wire_bytes(prefix, host) for host in HOSTS}
        result["conversations"] = conversations(small, large, watcher, texts[:talks])
        result["wire_bytes"] = {host: wire_bytes(prefix, host) - before[host] for host in HOSTS}
        result["exact"] = exact_answers(large, watcher, [t[:330] for t in texts[8:14]], "exact")
        result["hostile"] = hostile(large, watcher, [t[:330] for t in texts[14:17]])
        big = Layout(num_layers=64, num_kv_heads=8, head_dim=128, dtype="bfloat16")
        result["block"] = {"shipped": block_cost(watcher.exchange, layout_of(watcher.models["large"]), 32)}
        result["block"]["qwen3-32b"] = block_cost(watcher.exchange, big, 8)
        result["outage"] = outage(large, watcher, master, [t[:330] for t in texts[17:20]])
        for server in live.values():
            log = server.log.read_text(errors="replace")
            assert server.process.poll() is None and "kvhub is off" not in log, log[-3000:]
        turns = [t for talk in result["conversations"] for t in talk]
        result["summary"] = {
            "turns": len(turns),
            "turns_with_mapped": sum(t["mapped"] > 0 for t in turns),
            "mapped": sum(t["mapped"] for t in turns),
            "exact": sum(t["exact"] for t in turns),
            "prefilled": sum(t["prefilled"] for t in turns),
            "wrong": result["exact"]["wrong"] + result["hostile"]["wrong"] + result["outage"]["wrong"],
        }
        print(result["summary"])
        print(machine.write("mooncake", result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--home", help="KVHUB_HOME with mappers of the shipped pair; fitted if absent")
    parser.add_argument("--talks", type=int, default=8, help="conversations of six turns")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if reason := mooncake.missing():
        sys.exit(reason)
    if chosen.inside:
        inside(chosen.inside, chosen.home, chosen.talks)
        return
    prefix = f"kvhub{os.getpid()}"
    with servers.fitted_home(chosen.home) as home, hosts(prefix):
        command = [sys.executable, "-m", "benchmarks.mooncake", "--inside", prefix, "--home", home]
        command += ["--talks", str(chosen.talks)]
        subprocess.run(on(prefix, "router", command), check=True, cwd=servers.ROOT)


if __name__ == "__main__":
    main()
