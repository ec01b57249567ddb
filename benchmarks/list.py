"""`list`, `info` and local `search` with many mappers, beside what importing sqlmodel alone takes.

    python -m benchmarks.list [--mappers 10000 --repeats 9]

All are timed in turn, as processes of their own; output goes to a file, as in a pipeline. Seconds are of the
clock, medians; `cpu_s` is what the process itself computed, which a busy machine changes less.
Writes `benchmarks/results/list.json` with `mappers, list_s, import_sqlmodel_s`, and each one in `commands`.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from sqlmodel import Session
from support.records import mapper_record

from benchmarks.machine import describe, interval, write
from kvhub.settings import Settings
from kvhub_registry import Registry, ScoreRecord
from kvhub_registry.connect import make_engine, parse
from kvhub_registry.tables import (
    ArtifactTable,
    CalibrationTable,
    MapperTable,
    ModelTable,
    ScoreTable,
)

METRICS = (
    "nll",
    "ppl_ratio",
    "excess_nll",
    "kl",
    "top1",
    "attention_cosine",
    "r2_key",
    "r2_value",
    "gap_recovered",
)


def fill(url: str, count: int) -> None:
    """A registry of `count` evaluated mappers among 24 models, with the scores that an evaluation leaves."""
    names = [f"org/Model-{size}B" for size in range(24)]
    with Registry.open(url) as registry:
        first = mapper_record(0, source=names[0], target=names[1])
        registry.register(first)
        scores = [
            ScoreRecord(metric=metric, arm="mapped", domain=domain, value=0.5, low=0.4, high=0.6, n=1000)
            for metric in METRICS
            for domain in ("all", "wiki", "code", "c4")
        ]
        registry.add_scores(first.digest, scores)
    engine = make_engine(parse(url))
    with Session(engine) as session:
        template = {table: session.get(table, first.digest) for table in (MapperTable, ArtifactTable)}
        scored = [score.model_dump(exclude={"mapper_digest"}) for score in scores]
        models: set[str] = {first.source.digest, first.target.digest}
        calibrations: set[str] = {first.calibration.digest}
        mappers, artifacts, rows = [], [], []
        for seed in range(1, count):
            record = mapper_record(seed, source=names[seed % 24], target=names[(seed * 7 + 1) % 24])
            for model in (record.source, record.target):
                if model.digest not in models:
                    models.add(model.digest)
                    session.add(ModelTable(**model.model_dump(exclude={"name"})))
            if record.calibration.digest not in calibrations:
                calibrations.add(record.calibration.digest)
                session.add(CalibrationTable(**record.calibration.model_dump(exclude={"rows"})))
            mapper = template[MapperTable].model_dump() | {  # type: ignore[union-attr]
                "digest": record.digest,
                "source_digest": record.source.digest,
                "target_digest": record.target.digest,
                "source_name": record.source.name,
                "target_name": record.target.name,
                "source_slug": record.source.name.lower(),
                "target_slug": record.target.name.lower(),
                "calibration_digest": record.calibration.digest,
                "created": record.created,
            }
            mappers.append(mapper)
            artifacts.append(
                template[ArtifactTable].model_dump()  # type: ignore[union-attr]
                | {"mapper_digest": record.digest, "path": record.path}
            )
            rows += [{**score, "mapper_digest": record.digest} for score in scored]
        session.flush()
        connection = session.connection()
        for table, values in ((MapperTable, mappers), (ArtifactTable, artifacts), (ScoreTable, rows)):
            connection.execute(table.__table__.insert(), values)  # type: ignore[attr-defined]
        session.commit()
    engine.dispose()


def timed(command: list[str], home: Path) -> tuple[float, float]:
    """Seconds by the clock and of the processor, of one process whose output goes to a file."""
    with tempfile.TemporaryFile() as out:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, stdout=out, check=True, env={**os.environ, "KVHUB_HOME": str(home)})
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Fill a registry, time all, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mappers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        os.environ["KVHUB_HOME"] = str(home)
        fill(Settings.load().database_url, given.mappers)
        script = str(Path(sys.executable).with_name("kvhub"))
        one = mapper_record(0, source="org/Model-0B", target="org/Model-1B").digest
        commands = {
            "import sqlmodel": [sys.executable, "-c", "import sqlmodel"],
            "list": [script, "list"],
            "list --format json": [script, "list", "--format", "json"],
            "list --format tsv": [script, "list", "--format", "tsv"],
            "search --local": [script, "search", "--local", "model-3b", "--format", "json"],
            "info": [script, "info", one],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(given.repeats + 1):
            for name, command in commands.items():
                found[name].append(timed(command, home))
    found = {name: times[1:] for name, times in found.items()}  # the first fill the disk cache
    theirs = found.pop("import sqlmodel")
    result = {
        "mappers": given.mappers,
        "list_s": median(wall for wall, _ in found["list"]),
        "import_sqlmodel_s": median(wall for wall, _ in theirs),
        "import_sqlmodel_cpu_s": median(cpu for _, cpu in theirs),
        "commands": {
            name: {
                "s": median(wall for wall, _ in times),
                "cpu_s": median(cpu for _, cpu in times),
                "over_import_s": interval([a - b for (a, _), (b, _) in zip(times, theirs, strict=True)]),
                "over_import_cpu_s": interval([a - b for (_, a), (_, b) in zip(times, theirs, strict=True)]),
            }
            for name, times in found.items()
        },
        "machine": describe(),
    }
    print(write("list", result).read_text())


if __name__ == "__main__":
    main()
