"""What is exported, what the dashboard asks for and what `kvhub top` reads are the same names."""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import prometheus_client
import pytest
from click.testing import CliRunner, Result

from kvhub.cli import run
from kvhub.cli.top import command, summary
from kvhub.serving.exposition import Samples, parse
from kvhub_sglang.metrics import CATALOG, STAGES, Metrics
from kvhub_sglang.refusal import Code
from kvhub_sglang.report import Report, log_report

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "kvhub.json"
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def exported() -> str:
    """The text of a process in which everything has happened once, or a few times."""
    metrics = Metrics(True)
    metrics.serving(
        version="1", model="org/large", identity="cd" * 32, reuse="asked", max_hops=2,
        mappers=[(DIGEST, "org/small", True), ("ef" * 32, "org/tiny\x1b[31m", False)],
    )  # fmt: skip
    for number in range(4):
        metrics.request(Report(prompt=100, mapped=64, exact=16, reason=Code.MAPPED, milliseconds=4.0))
        metrics.shadow(DIGEST, kl=0.02 * number, agree=number > 0)
    metrics.request(Report(prompt=100, reason=Code.NO_SOURCE, milliseconds=1.0))
    metrics.lookups(9, 1)
    metrics.read(9, 9000)
    metrics.published(3, 0.01, 3000)
    metrics.dropped(2)
    metrics.error("exchange")
    metrics.healed("done")
    metrics.withdrawn("ef" * 32, "org/tiny\x1b[31m", False, "shadow")
    for stage in STAGES:
        metrics.stage(stage, 0.0)
    return prometheus_client.generate_latest().decode()


def family(name: str) -> str:
    """The catalogue's name of a sample."""
    for ending in ("_total", "_bucket", "_sum", "_count"):
        if name.removesuffix(ending) in CATALOG:
            return name.removesuffix(ending)
    return name


def test_everything_in_the_catalogue_is_exported_and_nothing_else(exported: str) -> None:
    names = {family(name) for name in parse(exported, "kvhub_").values if not name.endswith("_created")}
    assert names == set(CATALOG)


def test_labels_are_those_of_the_catalogue(exported: str) -> None:
    for name, samples in parse(exported, "kvhub_").values.items():
        if not name.endswith("_created"):
            for labels in samples:
                assert {key for key, _ in labels} - {"le", "pid"} == set(CATALOG[family(name)].labels), name


def test_threads_that_count_for_the_first_time_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(
        prometheus_client, "Counter", functools.partial(prometheus_client.Counter, registry=registry)
    )
    monkeypatch.setattr(
        prometheus_client, "Histogram", functools.partial(prometheus_client.Histogram, registry=registry)
    )
    metrics, start = Metrics(True), threading.Barrier(8)

    def publish(_: int) -> None:
        start.wait()
        metrics.published(2, 0.1, 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(8)))
    found = parse(prometheus_client.generate_latest(registry).decode())
    assert found.by("kvhub_blocks_total", "direction") == {"written": 16}
    assert found.total("kvhub_stage_seconds_count", stage="publish") == 8


def test_metrics_that_are_off_make_nothing() -> None:
    metrics = Metrics(False)
    metrics.request(Report(prompt=1))
    metrics.shadow(DIGEST, 1.0, True)
    metrics.off()
    assert not metrics._made


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(found) > 10
    return found


def test_the_dashboard_asks_for_what_exists() -> None:
    asked: set[str] = set()
    for expression in expressions():
        for name, labels in re.findall(r"(kvhub_\w+)\{([^}]*)\}", expression):
            known = CATALOG[family(name)]
            asked.add(family(name))
            ending = name.removeprefix(family(name))
            assert ending in {"counter": ("_total",), "gauge": ("",)}.get(
                known.kind, ("_bucket", "_sum", "_count")
            )
            used = {label.split("=")[0] for label in re.split(r",(?=\w+=)", labels)}
            assert used <= {*known.labels, "job", "instance", "le"}, expression
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            names = {family(name) for name in re.findall(r"kvhub_\w+", expression)}
            for label in re.split(r",\s*", grouped):
                assert label == "le" or any(label in CATALOG[name].labels for name in names), expression
        assert expression.count("(") == expression.count(")")
    assert asked == set(CATALOG)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert dashboard["title"] and dashboard["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_quantiles_are_interpolated_in_their_bucket() -> None:
    text = 'h_bucket{le="1.0"} 2\nh_bucket{le="3.0"} 6\nh_bucket{le="+Inf"} 8\n'
    samples = parse(text)
    assert samples.quantile("h", 0.5) == pytest.approx(2.0)  # the 4th of 8: half-way through 1..3
    assert samples.quantile("h", 0.125) == pytest.approx(0.5)
    assert samples.quantile("h", 0.99) == 3.0
    assert samples.quantile("g", 0.5) is None and parse('h_bucket{le="+Inf"} 0').quantile("h", 0.5) is None


def test_differences_of_two_scrapes() -> None:
    old, new = parse('a{x="1"} 5\na{x="2"} 1'), parse('a{x="1"} 7\na{x="2"} 1\na{x="3"} 4')
    assert new.since(old).by("a", "x") == {"1": 2, "2": 0, "3": 4}
    assert old.since(new).by("a", "x") == {"1": 5, "2": 1}  # the server was restarted


def test_lines_that_are_no_samples_are_passed_over() -> None:
    assert parse('# HELP x\nx{ 1\nx 1 2 3\nx{a="b"} one\n\0\nx{a="q\\"\\n"} 2').values == {
        "x": {frozenset({("a", 'q"\n')}): 2.0}
    }
    assert Samples().total("x") == 0


@pytest.fixture
def serve() -> Iterator[dict[str, str]]:
    """A web server; `text` is what it answers at /metrics, `url` its address."""
    page = {"text": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics" and bool(page["text"])
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(page["text"].encode() if found else b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page["url"] = f"http://127.0.0.1:{server.server_port}"
    yield page
    server.shutdown()
    server.server_close()


def top(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--once"], catch_exceptions=False)


def test_top_prints_what_was_counted(serve: dict[str, str], exported: str) -> None:
    serve["text"] = exported
    shown = top(serve["url"]).stdout
    for text in (
        "org/large",
        "kvhub on",
        "no_source",
        "hit ratio 90.0%",
        "read 9.0 kB",
        "exchange 1",
        "done 1",
    ):
        assert text in shown, text
    assert "WITHDRAWN" in shown and "top-1 0.750" in shown and "\x1b" not in shown
    assert re.search(r"mapped +256 tokens +51\.2%", shown)


def test_top_as_json(serve: dict[str, str], exported: str) -> None:
    serve["text"] = exported
    found = json.loads(top(f"{serve['url']}/metrics", "--format", "json").stdout)
    assert found["tokens"] == {"exact": 64, "mapped": 256, "prefilled": 180}
    assert found == summary(parse(exported, "kvhub_"))
    assert found["requests"] == {"mapped": 4, "no_source": 1} and found["hit_ratio"] == 0.9
    assert [mapper["in_use"] for mapper in found["mappers"]] == [True, False]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 3, "no metrics (HTTP 404)"),
        ("sglang:token_usage 0.5\n", 3, "exports no kvhub metrics"),
        ("\0\xff\n" * 100, 3, "exports no kvhub metrics"),
    ],
)
def test_top_of_something_else(
    serve: dict[str, str], capsys: pytest.CaptureFixture[str], text: str, code: int, says: str
) -> None:
    serve["text"] = text
    assert run(["top", serve["url"], "--once"]) == code
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error and len(error.splitlines()) == 2


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("http://127.0.0.1:1", 5, "no answer from http://127.0.0.1:1"),
        ("127.0.0.1:1", 5, "no answer"),
        ("ftp://x", 2, "is not the address of a server"),
        ("http://", 2, "is not the address of a server"),
        ("http://[::1", 2, "is not the address of a server"),
        ("http://127.0.0.1:port", 2, "is not the address of a server"),
    ],
)
def test_top_where_nothing_is(capsys: pytest.CaptureFixture[str], url: str, code: int, says: str) -> None:
    assert run(["top", url, "--once"]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("form", ["json", "plain"])
def test_log_lines_hold_the_report(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "json":
        monkeypatch.setenv("KVHUB_LOG", "json")
    report = Report(prompt=9, mapped=8, reason=Code.MAPPED, mapper=DIGEST, source="org/small")
    with caplog.at_level(logging.INFO):
        log_report("r1", report)
    [record] = caplog.records
    assert record.kvhub == {"rid": "r1", **report.as_meta()}  # type: ignore[attr-defined]
    text = record.getMessage().removeprefix("kvhub ")
    if form == "json":
        assert json.loads(text) == record.kvhub  # type: ignore[attr-defined]
    else:
        assert {"rid=r1", "mapped=8", "source=org/small"} <= set(text.split())


def test_a_clients_id_makes_no_log_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_report("a\nERROR kvhub is off\x1b[2J", Report(prompt=9, detail="of a\nclient"))
    [record] = caplog.records
    assert record.getMessage().isprintable() and "rid=a?ERROR kvhub is off?[2J" in record.getMessage()


def test_the_documentation_names_every_metric_stage_and_outcome() -> None:
    text = (DASHBOARD.parents[1] / "docs" / "operating.md").read_text()
    for name, metric in CATALOG.items():
        assert f"`{name}{'_total' if metric.kind == 'counter' else ''}`" in text, name
    for word in (*STAGES, *Code):
        assert f"`{word}`" in text, word
