"""`kvhub top`: what a live server reuses, maps, prefills and refuses."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from kvhub.cli import output
from kvhub.cli.numbers import Number

if TYPE_CHECKING:
    from kvhub.serving.exposition import Samples

ORIGINS = ("exact", "mapped", "prefilled")
STAGES = ("handoff", "wait", "read", "map", "publish", "heal", "shadow")


@click.command()
@click.argument("url", default="http://127.0.0.1:30000")
@click.option("--once", is_flag=True, help="Print what was counted since the server started, and stop.")
@click.option("--interval", type=Number(0.2, 3600), default=2.0, show_default=True, help="Seconds.")
@output.format_option("table", "json")
def command(url: str, once: bool, interval: float, form: str) -> None:
    """Watch the server at URL: tokens by origin, refusals by reason, times, bytes, mappers.

    The server must export metrics (`kvhub serve ... -- --enable-metrics`). Where the output is no
    terminal, or with --once, counts since its start are printed once; else those of the last interval
    beside them, until Ctrl-C.
    """
    from kvhub.serving.exposition import scrape

    now = scrape(url)
    if form == "json":
        output.as_json(summary(now))
        return
    if once or not sys.stdout.isatty():
        show(url, summary(now), None, 0.0)
        return
    try:
        while True:
            before, started = now, time.monotonic()
            time.sleep(interval)
            now = scrape(url)
            click.clear()
            show(url, summary(now), summary(now.since(before)), time.monotonic() - started)
    except KeyboardInterrupt:
        return


def summary(samples: Samples) -> dict[str, Any]:
    """The numbers of one scrape, or of the time between two, as `--format json` prints them."""
    info = next((labels for labels, value in samples.labels("kvhub_info") if value), {})
    tokens = samples.by("kvhub_tokens_total", "origin")
    looked = samples.by("kvhub_lookups_total", "result")
    seen = sum(looked.values())
    return {
        "server": info,
        "on": samples.total("kvhub_on") > 0 if "kvhub_on" in samples.values else None,
        "tokens": {origin: int(tokens.get(origin, 0)) for origin in ORIGINS},
        "requests": _counts(samples.by("kvhub_requests_total", "reason")),
        "hit_ratio": looked.get("hit", 0.0) / seen if seen else None,
        "stages": {stage: found for stage in STAGES if (found := _stage(samples, stage)) is not None},
        "blocks": _counts(samples.by("kvhub_blocks_total", "direction")),
        "bytes": _counts(samples.by("kvhub_bytes_total", "direction")),
        "errors": _counts(samples.by("kvhub_errors_total", "where")),
        "healed": _counts(samples.by("kvhub_healed_total", "result")),
        "mappers": [_mapper(samples, labels, value) for labels, value in samples.labels("kvhub_mapper")],
    }


def _counts(found: dict[str, float]) -> dict[str, int]:
    """Largest first, without zeros."""
    return {name: int(n) for name, n in sorted(found.items(), key=lambda item: (-item[1], item[0])) if n > 0}


def _stage(samples: Samples, stage: str) -> dict[str, float] | None:
    count = samples.total("kvhub_stage_seconds_count", stage=stage)
    if count < 1:
        return None
    half = samples.quantile("kvhub_stage_seconds", 0.5, stage=stage) or 0.0
    most = samples.quantile("kvhub_stage_seconds", 0.95, stage=stage) or 0.0
    total = samples.total("kvhub_stage_seconds_sum", stage=stage)
    return {
        "count": count,
        "mean_ms": total / count * 1e3,
        "p50_ms": half * 1e3,
        "p95_ms": most * 1e3,
        "seconds": total,
    }


def _mapper(samples: Samples, labels: dict[str, str], value: float) -> dict[str, Any]:
    name = labels.get("mapper", "")
    agree = {
        answer: samples.total("kvhub_shadow_top1_total", mapper=name, agree=answer)
        for answer in ("yes", "no")
    }
    compared = sum(agree.values())
    return {
        "mapper": name,
        "source": labels.get("source", ""),
        "draft": labels.get("draft") == "yes",
        "in_use": value > 0,
        "shadow_comparisons": int(compared),
        "shadow_kl_p50": samples.quantile("kvhub_shadow_kl", 0.5, mapper=name),
        "shadow_top1": agree["yes"] / compared if compared else None,
        "withdrawn": int(samples.total("kvhub_withdrawn_total", mapper=name)),
    }


def show(url: str, total: dict[str, Any], last: dict[str, Any] | None, seconds: float) -> None:
    """For people. last: what was counted in the last `seconds`, if anybody watches."""
    server, on = total["server"], total["on"]
    state = {True: "on", False: "OFF: it switched itself off, its log says why", None: "unknown"}[on]
    said = {
        key: output.clean(server.get(key, other))
        for key, other in (("model", url), ("identity", ""), ("reuse", "?"), ("max_hops", "?"))
    }
    click.echo(
        f"{said['model']}  {said['identity']}"
        f"  reuse {said['reuse']}, max hops {said['max_hops']}  kvhub {state}"
    )
    click.echo()
    _show_tokens(total, last, seconds)
    _show_counts("REQUESTS", total, last, "requests")
    _show_stages(total if last is None or not last["stages"] else last)
    line = []
    if total["hit_ratio"] is not None:
        line.append(f"hit ratio {total['hit_ratio']:.1%}")
    line += [f"{output.clean(name)} {output.size(count)}" for name, count in total["bytes"].items()]
    line += [f"blocks {output.clean(name)} {output.count(count)}" for name, count in total["blocks"].items()]
    if line:
        click.echo("exchange  " + ", ".join(line))
    for name in ("errors", "healed"):
        if total[name]:
            click.echo(f"{name}  " + ", ".join(f"{output.clean(k)} {v}" for k, v in total[name].items()))
    for mapper in total["mappers"]:
        notes = ["draft"] if mapper["draft"] else []
        notes += [] if mapper["in_use"] else ["WITHDRAWN"]
        if mapper["shadow_comparisons"]:
            kl, top1 = output.number(mapper["shadow_kl_p50"]), output.number(mapper["shadow_top1"])
            notes.append(f"shadow: n {mapper['shadow_comparisons']}, median KL {kl}, top-1 {top1}")
        name, source = output.clean(mapper["mapper"]), output.clean(mapper["source"])
        click.echo(f"mapper {name}  from {source}" + (f"  ({'; '.join(notes)})" if notes else ""))


def _show_tokens(total: dict[str, Any], last: dict[str, Any] | None, seconds: float) -> None:
    from kvhub.serving.exposition import shares

    share = shares(total["tokens"])
    for origin in ORIGINS:
        line = f"{origin:<10}{output.count(total['tokens'][origin]):>8} tokens  {share.get(origin, 0):>6.1%}"
        line += f"  {'#' * round(40 * share.get(origin, 0))}"
        if last is not None and seconds:
            line += f"  {last['tokens'][origin] / seconds:.0f}/s"
        click.echo(line.rstrip())
    click.echo()


def _show_counts(heading: str, total: dict[str, Any], last: dict[str, Any] | None, key: str) -> None:
    if not total[key]:
        return
    rows = [
        {"name": output.clean(name), "count": str(n), "last": str((last or {}).get(key, {}).get(name, 0))}
        for name, n in total[key].items()
    ]
    columns = [output.Column("name", heading), output.Column("count", "SINCE START", right=True)]
    output.table([*columns, *([output.Column("last", "LAST", right=True)] if last else [])], rows)
    click.echo()


def _show_stages(found: dict[str, Any]) -> None:
    if not found["stages"]:
        return
    columns = [output.Column("stage", "STAGE")]
    columns += [
        output.Column(k, h, right=True) for k, h in (("n", "N"), ("p50", "P50 MS"), ("p95", "P95 MS"))
    ]
    output.table(
        columns,
        [
            {
                "stage": stage,
                "n": str(int(row["count"])),
                "p50": f"{row['p50_ms']:.1f}",
                "p95": f"{row['p95_ms']:.1f}",
            }
            for stage, row in found["stages"].items()
        ],
    )
    click.echo()
