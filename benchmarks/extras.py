"""Exact prefix, healing and shadows on live servers; results/extras.json.

    python -m benchmarks.extras --home HOME

The shipped pair on one exchange: `small` answers first, `large`, which has never seen the text, continues.
`large` is set as by `kvhub serve --exact-prefix 4 --heal --shadow 1`. Each conversation is a tenant:

  prefix    the first four tokens are exact, computed by a request of the server's own; the rest is mapped
  shadow    once idle, one comparison of the mapped next token with the native one is counted
  healed    once idle, all of the conversation is exact: the next turn maps nothing, computes what is new
  answer    that turn's answer is, to the token, the one of a tenant without any reuse

A control server without the three options sees the same conversations: nothing of it may happen there.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import machine, servers
from benchmarks.servers import Server
from kvhub.serving.exposition import Samples, scrape

PREFIX, HISTORY, NEW = 4, 200, 40
SETTINGS = {"heal": True, "shadow": 1.0, "stage_wait_ms": 20000, "publish_wait_ms": 5000}
PATIENCE = 120.0
"""Seconds that idle work of one conversation may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--home", help="KVHUB_HOME with mappers of the shipped pair; fitted here if not given"
    )
    parser.add_argument("--conversations", type=int, default=12)
    arguments = parser.parse_args()
    tokens = servers.token_ids(slice(0, 60000))
    texts = [tokens[i * 300 : i * 300 + HISTORY + NEW] for i in range(arguments.conversations)]
    result: dict[str, Any] = {
        "settings": {**SETTINGS, "exact_prefix": PREFIX},
        "tokens": {"prompt": HISTORY, "new_in_the_second_turn": NEW},
        "machine": machine.describe(),
    }
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(arguments.home))
        place = stack.enter_context(servers.exchange_directory())
        common: dict[str, Any] = {"flags": ["--enable-metrics", "--max-total-tokens", "16384"]}
        small = servers.start(stack, "small", home, place, **common)
        large = servers.start(
            stack, "large", home, place, settings=SETTINGS, mapper={"exact_prefix": PREFIX}, **common
        )
        for server in (small, large):
            server.wait(servers.PATIENCE)
        result["with"] = [converse(small, large, text, f"with-{i}") for i, text in enumerate(texts)]
        result["metrics"] = counted(scrape(large.url))
        stack.pop_all().close()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(arguments.home))
        place = stack.enter_context(servers.exchange_directory())
        plain = {key: value for key, value in SETTINGS.items() if key.endswith("_ms")}
        small = servers.start(stack, "small", home, place, **common)
        large = servers.start(stack, "large", home, place, settings=plain, **common)
        for server in (small, large):
            server.wait(servers.PATIENCE)
        result["control"] = [
            converse(small, large, text, f"control-{i}", wait=False) for i, text in enumerate(texts[:4])
        ]
        result["control_metrics"] = counted(scrape(large.url))
    result["summary"] = summary(result)
    path = machine.write("extras", result)
    for name, value in result["summary"].items():
        print(f"{name:<28} {value}")
    print(path)


def converse(
    small: Server, large: Server, text: list[int], tenant: str, *, wait: bool = True
) -> dict[str, Any]:
    """Two turns: small answers, large continues on mapped rows, is idle, and continues again."""
    prompt = text[:HISTORY]
    said = small.generate(prompt, 8, cache_salt=tenant)["output_ids"]
    before = counted(scrape(large.url))
    second = [*prompt, *said]
    mapped = large.generate(second, 8, cache_salt=tenant, kv_hints=servers.hints())
    seconds = idle(large, before) if wait else None
    third = [*second, *mapped["output_ids"], *text[HISTORY:]]
    healed = large.generate(third, 24, cache_salt=tenant, kv_hints=servers.hints())
    native = large.generate(third, 24, cache_salt=f"{tenant}-native")
    keys = ("exact", "mapped", "prefilled", "reason", "hops", "waited_ms")
    return {
        "mapped_turn": {"prompt": len(second), **{k: mapped["meta_info"]["kvhub"][0][k] for k in keys}},
        "next_turn": {"prompt": len(third), **{k: healed["meta_info"]["kvhub"][0][k] for k in keys}},
        "idle_work_s": seconds,
        "answer_is_native": healed["output_ids"] == native["output_ids"],
    }


def idle(server: Server, before: dict[str, Any]) -> float:
    """Wait until one more conversation was compared and healed; the seconds that took."""
    started = time.monotonic()
    while time.monotonic() - started < PATIENCE:
        now = counted(scrape(server.url))
        if now["shadows"] > before["shadows"] and now["healed"] > before["healed"]:
            return round(time.monotonic() - started, 2)
        time.sleep(0.2)
    raise SystemExit(f"neither compared nor healed within {PATIENCE:.0f} s: {now}")


def counted(samples: Samples) -> dict[str, Any]:
    """What the server counted of shadows and healing, and the time they took."""
    agree = samples.by("kvhub_shadow_top1_total", "agree")
    return {
        "shadows": int(sum(agree.values())),
        "shadows_agree": int(agree.get("yes", 0)),
        "shadow_kl_p50": samples.quantile("kvhub_shadow_kl", 0.5),
        "healed": int(samples.total("kvhub_healed_total", result="done")),
        "healed_otherwise": {
            name: int(n) for name, n in samples.by("kvhub_healed_total", "result").items() if name != "done"
        },
        "seconds": {
            stage: round(samples.total("kvhub_stage_seconds_sum", stage=stage), 3)
            for stage in ("shadow", "heal")
        },
        "errors": samples.by("kvhub_errors_total", "where"),
        "withdrawn": int(samples.total("kvhub_withdrawn_total")),
    }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """How many conversations did what they should."""
    turns, control = result["with"], result["control"]
    blocks = HISTORY // 64 * 64
    return {
        "conversations": len(turns),
        "prefix_exact_rest_mapped": sum(
            (t["mapped_turn"]["exact"], t["mapped_turn"]["mapped"]) == (PREFIX, blocks - PREFIX)
            for t in turns
        ),
        "shadows": result["metrics"]["shadows"],
        "healed": result["metrics"]["healed"],
        "next_turn_maps_nothing": sum(t["next_turn"]["mapped"] == 0 for t in turns),
        "next_turn_computes_the_new": sum(
            t["next_turn"]["exact"] == t["next_turn"]["prompt"] - NEW - 1 for t in turns
        ),
        "answer_is_native": sum(t["answer_is_native"] for t in turns),
        "control_conversations": len(control),
        "control_mapped_from_the_start": sum(
            (t["mapped_turn"]["exact"], t["mapped_turn"]["mapped"]) == (0, blocks) for t in control
        ),
        "control_next_turn_mapped": sum(t["next_turn"]["mapped"] > 0 for t in control),
        "control_shadows_and_healed": result["control_metrics"]["shadows"]
        + result["control_metrics"]["healed"],
    }


if __name__ == "__main__":
    main()
