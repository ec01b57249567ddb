"""Two live SGLang servers with kvhub and one stock server, on the shipped pair (the suite's three starts).

The server of the small model maps with the Triton kernels, in Triton's interpreter; that of the large one
with matrix products.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.server import Server, free_port, hints, running, server_environment
from transformers import DynamicCache

from kvhub.exchange.block import decode, decode_header
from kvhub.mapper import Mapper
from kvhub.model.load import LoadedModel, load_model
from kvhub_kernels.rows import Rows

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
pytestmark = pytest.mark.server


@dataclass(frozen=True)
class World:
    small: Server
    large: Server
    stock: Server
    exchange: Path
    mappers: dict[str, Path]
    """By target."""
    prompts: list[list[int]]
    source: LoadedModel
    target: LoadedModel


def kvhub(home: Path, *arguments: str) -> str:
    environment = {**os.environ, "KVHUB_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvhub", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("live")
    home, exchange = place / "home", place / "exchange"
    text = ROOT / "demo" / "text" / "wikipedia.txt"
    kvhub(
        home, "fit", "models/small", "models/large", "--text", str(text), "--both", "--k", "2",
        "--sequences", "30", "--length", "192", "--stride", "2", "--dtype", "float32", "--recipe", "ridge",
    )  # fmt: skip
    source, target = load_model(MODELS / "small", torch.float32), load_model(MODELS / "large", torch.float32)
    mappers = {Mapper.from_pretrained(p).manifest.target.name: p for p in (home / "mappers").iterdir()}
    template = place / "template.jinja"
    template.write_text(TEMPLATE)
    with contextlib.ExitStack() as stack:

        def flags(name: str) -> list[str]:
            return [str(template) if flag == "@" else flag for flag in SGLANG[name]]

        def start(name: str, *command: str, env: dict[str, str]) -> Server:
            port = free_port()
            return stack.enter_context(
                running(
                    [sys.executable, "-m", *command, "--port", str(port), *flags(name)],
                    env,
                    port=port,
                    log=place / f"{name}.log",
                    cwd=ROOT,
                    wait=False,
                )
            )

        def serve(name: str, other: str, **env: str) -> Server:
            return start(
                name,
                "kvhub", "serve", f"models/{name}", "--reuse-from", f"models/{other}", "--allow-draft",
                "--max-hops", "2", "--worth", "always", "--exchange", str(exchange),
                "--stage-wait-ms", "20000", "--publish-wait-ms", "5000",
                env={**os.environ, "KVHUB_HOME": str(home), "OMP_NUM_THREADS": "1", **env},
            )  # fmt: skip

        small, large = serve("small", "large", TRITON_INTERPRET="1"), serve("large", "small")
        stock_env = server_environment(MODELS / "large", {"OMP_NUM_THREADS": "1"})
        stock = start(
            "stock", "sglang.launch_server", "--model-path", str(MODELS / "large"), "--dtype", "float32",
            "--sleep-on-idle", "--max-total-tokens", "16384", env=stock_env,
        )  # fmt: skip
        for server in (small, large, stock):
            server.wait()
        tokens = target.tokenizer(text.read_text()[:60000])["input_ids"]
        prompts = [tokens[i * 300 : i * 300 + 260] for i in range(24)]
        yield World(small, large, stock, exchange, mappers, prompts, source, target)
        for server in (small, large):
            assert server.process.poll() is None  # nothing ended the scheduler
            assert "memory leak" not in server.log.read_text(errors="replace")


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the shipped tokenizer has none

SGLANG: dict[str, list[str]] = {
    "small": ["--", "--enable-metrics", "--chat-template", "@"],
    "large": [
        "--",
        "--enable-metrics",
        "--chat-template",
        "@",
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "64",
    ],
    "stock": [],
}


def meta(answer: dict[str, Any]) -> dict[str, Any]:
    [report] = answer["meta_info"]["kvhub"]
    assert report["exact"] + report["mapped"] + report["prefilled"] == answer["meta_info"]["prompt_tokens"]
    return dict(report)


def test_without_reuse_the_answers_are_those_of_stock_sglang(world: World) -> None:
    for prompt in world.prompts[:6]:
        ours = world.large.generate(prompt, 24)
        assert ours["output_ids"] == world.stock.generate(prompt, 24)["output_ids"]
        assert meta(ours)["mapped"] == 0 and meta(ours)["reason"] == "not_asked"


def published(exchange: Path, model: str, before: set[Path]) -> list[torch.Tensor]:
    """Payloads `[layers, 2, 64, heads, dim]` of the two blocks of `model` that are there now and were not."""
    deadline = time.monotonic() + 20
    while True:  # an answer does not wait long for its blocks to be written
        found = {}
        for path in set(exchange.rglob("*.kv")) - before:
            data = path.read_bytes()
            header = decode_header(data)[0]
            if header.model == model:
                block = decode(
                    torch.frombuffer(bytearray(data), dtype=torch.uint8),
                    bytes.fromhex(header.key),
                    model,
                    header.layout,
                )
                found[header.position] = block.payload
        if len(found) >= 2 or time.monotonic() > deadline:
            return [payload for _, payload in sorted(found.items())]
        time.sleep(0.2)


def test_the_triton_kernels_serve_what_the_matrix_products_do(world: World) -> None:
    """The real kernels, in Triton's interpreter, in a live server: rows of its pool, and the next tokens."""
    assert "with triton (interpreted)" in world.small.log.read_text(errors="replace")
    assert "with matrix products in float32" in world.large.log.read_text(errors="replace")
    prompt = world.prompts[19][:140]
    before = set(world.exchange.rglob("*.kv"))
    world.large.generate(prompt, 4)
    given = published(world.exchange, world.target.identity.digest, before)
    answer = world.small.generate(prompt, 8, kv_hints=hints())
    assert meta(answer)["mapped"] == 128 and meta(answer)["source"] == "large"
    # The rows as they lay in the server's pool, published with the answer.
    rows = torch.cat(published(world.exchange, world.source.identity.digest, before), dim=2)
    mapper = Mapper.from_pretrained(world.mappers["small"])
    want = torch.full_like(rows, float("nan"))
    target = Rows(list(want[:, 0]), list(want[:, 1]), 128)
    assert mapper.map_blocks(given, torch.arange(128), target)  # matrix products, in this process
    assert mapper.engine("cpu") == "matrix products in float32"
    # 1e-5 of the rows' own size: the interpreter adds up in another order
    torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(want):
        cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
    text, where = torch.tensor([prompt[128:]]), torch.arange(128, 140)[None]
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(8):
            logits = world.source.model(text, past_key_values=cache, position_ids=where).logits[0, -1]
            tokens.append(int(logits.argmax()))
            text, where = torch.tensor([tokens[-1:]]), where[:, -1:] + 1
    assert answer["output_ids"] == tokens


def test_a_conversation_continues_on_the_other_server_and_returns(world: World) -> None:
    first = world.small.generate(world.prompts[6], 40, kv_hints=hints())
    second_prompt = [*world.prompts[6], *first["output_ids"], 11, 12, 13]
    second = world.large.generate(second_prompt, 140, kv_hints=hints())
    assert meta(second)["mapped"] == 256 and meta(second)["draft"] and meta(second)["source"] == "small"
    third = world.small.generate([*second_prompt, *second["output_ids"], *range(40, 60)], 8, kv_hints=hints())
    assert meta(third)["hops"] == 2 and meta(third)["mapped"] > 0
    assert meta(third)["exact"] == 299  # 260 + 40 tokens, the last of which has no row


def test_logprobs_are_those_of_transformers_on_the_same_mapped_cache(world: World) -> None:
    prompt = world.prompts[7]
    world.small.generate(prompt, 4)
    answer = world.large.generate(
        prompt, 1, kv_hints=hints(), return_logprob=True, top_logprobs_num=20, logprob_start_len=-1
    )
    mapped = meta(answer)["mapped"]
    assert mapped == 256
    top = answer["meta_info"]["output_top_logprobs"][0]
    with torch.no_grad():
        ids = torch.tensor([prompt])
        cache = world.source.model(ids[:, :mapped], use_cache=True).past_key_values
        mapper = Mapper.from_pretrained(world.mappers["large"])
        moved = mapper.map(cache, source=world.source, target=world.target)
        logits = world.target.model(
            ids[:, mapped:], past_key_values=moved, position_ids=torch.arange(mapped, 260)[None]
        ).logits[0, -1]
        reference = logits.float().log_softmax(-1)
        native = world.target.model(ids).logits[0, -1].float().log_softmax(-1)
    found = torch.tensor([value for value, *_ in top])
    where = torch.tensor([token for _, token, *_ in top])
    assert (found - reference[where]).abs().max() < 1e-4
    assert (found - native[where]).abs().max() > 1e-2  # so that the comparison means something


def test_lossy_rows_never_reach_an_exact_request(world: World) -> None:
    prompt = world.prompts[8]
    native = world.stock.generate(prompt, 16)["output_ids"]
    for salt in (None, "tenant-a"):
        salted = {} if salt is None else {"cache_salt": salt}
        world.small.generate(prompt, 4, **salted)
        assert meta(world.large.generate(prompt, 16, kv_hints=hints(), **salted))["mapped"] > 0
    forged = ["kvhub:", "kvhub:0:1:0:", f"kvhub:{'0' * 32}:{'0' * 32}:0:"]
    attempts: list[dict[str, Any]] = [
        {"cache_salt": "tenant-b", "kv_hints": hints()},
        *({"cache_salt": name, "kv_hints": hints()} for name in forged),
        *({"extra_key": name, "kv_hints": hints()} for name in forged),
        {"cache_salt": "tenant-a"},
        {"kv_hints": hints(reuse=False)},
        {},
    ]
    for attempt in attempts:
        answer = world.large.generate(prompt, 16, **attempt)
        assert meta(answer)["mapped"] == 0, attempt
        assert answer["output_ids"] == native, attempt


def test_openai_chat_and_metrics(world: World) -> None:
    messages = [{"role": "user", "content": world.target.tokenizer.decode(world.prompts[9])}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, "return_meta_info": True}
    world.small.post("/v1/chat/completions", body)
    answer = world.large.post("/v1/chat/completions", {**body, "custom_params": {"kvhub": {"reuse": True}}})
    assert answer["choices"][0]["meta_info"]["kvhub"][0]["mapped"] > 0


def test_metrics_count_tokens_by_origin(world: World) -> None:
    body = {"prompt": world.prompts[10], "max_tokens": 4, "model": "m", "temperature": 0}
    world.small.post("/v1/completions", body)
    world.large.post("/v1/completions", {**body, "custom_params": {"kvhub": {"reuse": True}}})
    metrics = world.large.get("/metrics")
    mapped = [
        line for line in metrics.splitlines() if line.startswith("kvhub_tokens_total{") and "mapped" in line
    ]
    assert mapped and sum(float(line.rsplit(" ", 1)[1]) for line in mapped) >= 256


def test_top_shows_a_live_server(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    from kvhub.cli import run

    prompt = world.prompts[21]
    world.small.generate(prompt, 4)
    world.large.generate(prompt, 4, kv_hints=hints())
    assert run(["top", world.large.url, "--once", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on"] and found["server"]["model"] == "large" and found["server"]["max_hops"] == "2"
    assert found["tokens"]["mapped"] >= 256 and found["bytes"]["read"] > 0
    assert found["stages"]["map"]["p50_ms"] > 0 and found["hit_ratio"] > 0
    assert run(["top", world.large.url, "--once"]) == 0
    assert "kvhub on" in capsys.readouterr().out
    assert run(["top", world.stock.url, "--once"]) == 3


def test_a_chat_moves_between_sizes_through_the_proxy(world: World) -> None:
    sys.path.insert(0, str(ROOT))
    from demo.router.proxy import serving

    messages = [{"role": "user", "content": world.target.tokenizer.decode(world.prompts[20])}]
    with serving({"small": world.small.url, "large": world.large.url}) as url:
        proxied = dataclasses.replace(world.small, url=url)
        body = {"model": "small", "max_tokens": 4, "temperature": 0, "return_meta_info": True}
        said = proxied.post("/v1/chat/completions", {**body, "messages": messages})
        answer = said["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": " And then?"}]
        moved = proxied.post("/v1/chat/completions", {**body, "model": "auto", "messages": messages})
    [report] = moved["choices"][0]["meta_info"]["kvhub"]
    assert report["source"] == "small" and report["mapped"] >= 192


def test_flush_abort_and_load_lose_nothing(world: World) -> None:
    choose = random.Random(3)
    failures: list[str] = []

    def client(seed: int) -> None:
        for number in range(6):
            prompt = world.prompts[11 + (seed + number) % 6]
            try:
                world.large.generate(
                    [*prompt, seed, number],
                    24,
                    kv_hints=hints() if number % 2 else None,
                    rid=f"{seed}-{number}",
                )
            except RuntimeError as error:
                if "abort" not in str(error).casefold():
                    failures.append(str(error))

    for prompt in world.prompts[11:17]:
        world.small.generate(prompt, 4)
    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        rid = f"{choose.randrange(4)}-{choose.randrange(6)}"
        with contextlib.suppress(RuntimeError, ValueError):
            world.large.post("/abort_request", {"rid": rid})
    for thread in threads:
        thread.join()
    assert not failures
    with contextlib.suppress(ValueError):  # answers in plain text
        world.large.post("/flush_cache", {})
    assert (
        world.large.generate(world.prompts[0], 24)["output_ids"]
        == world.stock.generate(world.prompts[0], 24)["output_ids"]
    )


def test_an_exchange_that_dies_leaves_correct_answers(world: World) -> None:
    """Last: the exchange does not come back."""
    prompt = world.prompts[18]
    world.small.generate(prompt, 4)
    shutil.rmtree(world.exchange)
    world.exchange.write_text("not a directory")
    for server, other in ((world.large, world.stock),):
        answer = server.generate(prompt, 16, kv_hints=hints())
        assert meta(answer)["mapped"] == 0
        assert answer["output_ids"] == other.generate(prompt, 16)["output_ids"]
    world.small.generate([*prompt, 1, 2], 4, kv_hints=hints())
