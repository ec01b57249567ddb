"""Eight processes at once: nothing lost, nothing doubled, no half-written mapper."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from support.records import mapper_record

from kvhub_registry import Registry, State

WORKER = """
import sys
from support.records import mapper_record
from kvhub_registry import Registry, ScoreRecord, State
url, worker = sys.argv[1], int(sys.argv[2])
with Registry.open(url) as registry:
    for turn in range(8):
        shared, own = mapper_record(turn), mapper_record(1000 + worker * 100 + turn)
        registry.register(shared)
        registry.register(own)
        score = ScoreRecord(metric="top1", arm="mapped", domain="all", value=worker, low=0, high=1, n=turn)
        registry.add_scores(shared.digest, [score])
        registry.set_state(own.digest, State.READY, f"worker {worker}")
        registry.set_alias(f"alias-{worker}-{turn}", own.digest)
        registry.set_alias("last", own.digest)
        if turn % 4 == 3:
            registry.remove(own.digest)
"""


def start(url: str, worker: int, code: str = WORKER) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}", url, str(worker)],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_processes_register_and_promote_at_once(url: str) -> None:
    workers = [start(url, worker) for worker in range(8)]  # the first ones race to make the tables, too
    for process in workers:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    with Registry.open(url) as registry:
        rows = {row.digest: row for row in registry.list()}
        shared = [rows.pop(mapper_record(turn).digest) for turn in range(8)]
        assert all(row.state is State.DRAFT and len(row.scores) == 1 for row in shared)
        assert len(rows) == 8 * 6
        for row in rows.values():
            assert row.state is State.READY
            assert [alias for alias in row.aliases if alias != "last"] != []


def test_killed_writers_leave_a_sound_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/r.db"
    with Registry.open(url) as registry:
        for _ in range(2):
            before = len(registry.list())
            code = WORKER.replace("range(8)", f"range({before}, 10**6)")
            workers = [start(url, worker, code) for worker in range(2)]
            deadline = time.monotonic() + 120
            while len(registry.list()) < before + 6:  # both are writing now
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for process in workers:
                process.send_signal(signal.SIGKILL)
                process.communicate()
    with Registry.open(url) as registry:
        with registry._engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
            pairs = "SELECT count(*) FROM kvhub_mapper LEFT JOIN kvhub_artifact ON mapper_digest = digest"
            half = f"{pairs} WHERE mapper_digest IS NULL"
            assert connection.exec_driver_sql(half).scalar_one() == 0
        assert registry.list()
