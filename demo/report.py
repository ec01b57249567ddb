"""The table a person reads and the JSON a program reads: the same numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.conversation import ANSWER, MAX_HOPS, Turn, as_dict


def show(turns: Sequence[Turn], conversations: int, drafts: Sequence[str]) -> None:
    """Print one row a turn, and what must be known to read it."""
    table = Table(title="One conversation, two models", title_justify="left")
    for name in ("turn", "model", "prompt", "exact", "mapped", "prefilled", "TTFT", "without", "agreement"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for number, turn in enumerate(turns, 1):
        table.add_row(
            str(number),
            turn.model,
            str(turn.prompt_tokens),
            str(turn.exact_tokens),
            str(turn.mapped_tokens),
            str(turn.prefilled_tokens),
            f"{turn.ttft_ms:.1f} ms",
            f"{turn.ttft_ms_without:.1f} ms",
            f"{turn.agreement:.0%}",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 110  # a file has no edge to wrap at
    console.print(table)
    for number, turn in enumerate(turns, 1):
        if number > 1 and turn.mapped_in < conversations:
            print(f"# Turn {number} mapped something in {turn.mapped_in} of {conversations} conversations.")
    if drafts:
        print(f"# NOT PASSED THE GATE, served by override: mapper {', '.join(drafts)}.")
    print(f"# TTFT: median of {conversations} conversations, each held with kvhub and at once again without,")
    print("# on the same servers; without, a model still uses its own cache.")
    if any(turn.ttft_ms > turn.ttft_ms_without for turn in turns[1:]):
        print(
            "# A handoff took longer than the prefill that it saved: these models are tiny (see benchmarks/)."
        )
    print(f"# Agreement: of the {ANSWER} answer tokens, those a native prefill puts first too.")


def write(path: Path, turns: Sequence[Turn], conversations: int, mappers: Sequence[dict[str, Any]]) -> None:
    """Write demo-report.json."""
    path.write_text(
        json.dumps(
            {
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": {"cpus": os.cpu_count(), "architecture": platform.machine()},
                "conversations": conversations,
                "answer_tokens": ANSWER,
                "max_hops": MAX_HOPS,
                "mappers": list(mappers),
                "turns": [as_dict(turn) for turn in turns],
            },
            indent=1,
        )
        + "\n"
    )
