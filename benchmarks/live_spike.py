"""The situations that lose slots or end a scheduler, on live servers; results/live_spike.json.

    python -m benchmarks.live_spike

For page sizes 1 and 16, with and without forced retraction (SGLANG_TEST_RETRACT), in
chunks of 32 tokens, with SGLang's own memory checks strict while busy and while idle
(a lost slot ends the server): exact blocks of another server of the same model must
give the greedy answer of a native prefill; lossy reuse, aborts in mid-prefill, a
flush and concurrent load must leave native answers native.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.server import Server, free_port, hints, running

from benchmarks import machine

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "OMP_NUM_THREADS": "1",
}


def report(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["meta_info"]["kvhub"][0])


def exercise(
    small: Server, twin: Server, target: Server, prompts: list[list[int]], tenant: str
) -> dict[str, Any]:
    """One target server through everything; raises on a wrong answer.

    tenant: new for every server: what one computed exactly would be returned to the next.
    """
    first, second = f"{tenant}-a", f"{tenant}-b"
    native = [twin.generate(prompt, 24)["output_ids"] for prompt in prompts]
    exact = [target.generate(prompt, 24, kv_hints=hints()) for prompt in prompts[:4]]
    assert [answer["output_ids"] for answer in exact] == native[:4], "exact blocks changed an answer"
    reused = [report(answer)["exact"] for answer in exact]
    assert min(reused) > 0, reused

    def lossy(prompt: list[int], salt: str) -> int:
        small.generate(prompt, 2, cache_salt=salt)
        answer = target.generate(prompt, 24, kv_hints=hints(), cache_salt=salt)
        return int(report(answer)["mapped"])

    mapped = [lossy(prompt, first) for prompt in prompts[4:8]]
    assert min(mapped) > 0, mapped
    for prompt, expected in zip(prompts[4:8], native[4:8], strict=True):
        assert target.generate(prompt, 24, cache_salt=first)["output_ids"] == expected
    aborted = abort_in_prefill(target, [token for prompt in prompts[8:14] for token in prompt][:1600])
    time.sleep(1)
    target.flush()
    again = [lossy(prompt, second) for prompt in prompts[4:8]]
    answers: dict[int, list[int]] = {}

    def client(number: int) -> None:
        reuse = {"kv_hints": hints(), "cache_salt": second} if number % 2 else {}
        answers[number] = target.generate(prompts[number], 64, **reuse)["output_ids"]

    run([lambda n=n: client(n) for n in range(4, 12)])  # type: ignore[misc]
    long_native = {n: twin.generate(prompts[n], 64)["output_ids"] for n in range(4, 12) if n % 2 == 0}
    assert all(answers[n] == long_native[n] for n in long_native), "a native answer changed under load"
    time.sleep(3)  # the idle check of SGLang runs
    assert target.process.poll() is None, target.log_tail()
    log = target.log.read_text(errors="replace")
    assert "memory leak" not in log and "kvhub is off" not in log
    return {
        "exact_reused": reused,
        "mapped": mapped,
        "mapped_after_flush": again,
        "aborted_in_prefill": aborted,
        "retractions": log.count("retract"),
        "native_answers_checked": 8 + len(long_native),
        "wrong": 0,
    }


def abort_in_prefill(target: Server, prompt: list[int]) -> bool:
    """Abort a long prompt while its chunks are computed; True if it did not finish."""
    finished: list[dict[str, Any]] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            finished.append(target.generate(prompt, 4, rid="victim", kv_hints=hints()))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.15)
    with contextlib.suppress(ValueError, RuntimeError):
        target.post("/abort_request", {"rid": "victim"})
    thread.join()
    return not finished or finished[0]["meta_info"]["finish_reason"]["type"] == "abort"


def run(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    from transformers import AutoTokenizer

    text = Path("demo/text/wikipedia.txt").read_text()[20000:90000]
    ids = AutoTokenizer.from_pretrained("models/large")(text)["input_ids"]
    prompts = [ids[i * 400 : i * 400 + 260 + 9 * i] for i in range(14)]
    result: dict[str, Any] = {"machine": machine.describe(), "runs": []}
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhub-spike-")))

        def serve(model: str, *, reuse: bool, flags: list[str], env: dict[str, str]) -> Any:
            port = free_port()
            command = [sys.executable, "-m", "kvhub", "serve", f"models/{model}", "--allow-draft"]
            command += ["--worth", "always"]
            command += ["--exchange", str(place / "exchange"), "--port", str(port)]
            command += ["--reuse-from", "models/small"] if reuse else []
            return running([*command, "--", *flags], {**os.environ, **STRICT, **env}, port=port, wait=False)

        small = stack.enter_context(serve("small", reuse=False, flags=[], env={}))
        twin = stack.enter_context(serve("large", reuse=False, flags=[], env={}))
        for page_size in (1, 16):
            for retract in (False, True):
                flags = ["--page-size", str(page_size), "--chunked-prefill-size", "32"]
                env = {"SGLANG_TEST_RETRACT": "1"} if retract else {}
                with serve("large", reuse=True, flags=flags, env=env) as target:
                    for server in (small, twin, target):
                        server.wait()
                    found = exercise(small, twin, target, prompts, f"{page_size}-{retract}")
                result["runs"].append({"page_size": page_size, "forced_retraction": retract, **found})
                print(result["runs"][-1], flush=True)
    print(machine.write("live_spike", result))


if __name__ == "__main__":
    main()
