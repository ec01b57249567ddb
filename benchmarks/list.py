"""`kvhub list` with many mappers, beside what importing sqlmodel alone takes on the same machine.

    python -m benchmarks.list [--mappers 10000 --repeats 9]

Both are timed in turn, as processes of their own; output goes to a file, as in a pipeline.
Writes `benchmarks/results/list.json` with `mappers, list_s, import_sqlmodel_s`.
"""

from __future__ import annotations

import argparse
import os
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


def timed(command: list[str], home: Path) -> float:
    """Wall seconds of one process whose output goes to a file."""
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        subprocess.run(command, stdout=out, check=True, env={**os.environ, "KVHUB_HOME": str(home)})
        return time.perf_counter() - began


def main() -> None:
    """Fill a registry, time both, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mappers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        os.environ["KVHUB_HOME"] = str(home)
        fill(Settings.load().database_url, given.mappers)
        script = Path(sys.executable).with_name("kvhub")
        ours, theirs = [], []
        for _ in range(given.repeats + 1):
            ours.append(timed([str(script), "list"], home))
            theirs.append(timed([sys.executable, "-c", "import sqlmodel"], home))
    ours, theirs = ours[1:], theirs[1:]  # the first ones fill the disk cache
    result = {
        "mappers": given.mappers,
        "list_s": median(ours),
        "import_sqlmodel_s": median(theirs),
        "over_import_s": interval([a - b for a, b in zip(ours, theirs, strict=True)]),
        "machine": describe(),
    }
    print(write("list", result).read_text())


if __name__ == "__main__":
    main()
