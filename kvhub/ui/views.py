"""What the pages show, from the registry and from the artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import read_manifest
from kvhub.catalog import files_of
from kvhub.cli import output
from kvhub.errors import KvhubError
from kvhub.settings import Settings
from kvhub.store.coverage import Cell, Coverage, today
from kvhub.ui.page import bars, page, table
from kvhub_registry import EventRecord, MapperRow

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.evaluation.evidence import Evidence


def index(coverage: Coverage, rows: Sequence[MapperRow], query: str, missed: str, *, any_model: bool) -> str:
    """The matrix, the search field and what it found. missed: one line of mappers that are not registered.

    any_model: whether there are models at all, although the matrix may show none.
    """
    form = (
        '<form method="get" action="/"><label for="q">Find </label>'
        f'<input id="q" name="q" value="{escape(query)}" placeholder="model, alias, repository or digest"> '
        "<button>Search</button></form>"
    )
    found = [
        (
            link(row),
            escape(row.source.name),
            escape(row.target.name),
            escape(row.state.value),
            output.number(row.score("top1")),
            output.number(row.score("attention_cosine")),
            output.number(row.score("gap_recovered")),
            output.size(row.size),
            escape(", ".join(row.aliases)),
        )
        for row in rows
    ]
    heads = ("digest", "source", "target", "state", "top-1", "cosine", "gap recovered", "size", "names")
    listing = table(heads, found, numbers=(4, 5, 6, 7)) if found else '<p class="note">no mapper matches</p>'
    note = [f'<p class="failing">{escape(missed)}</p>'] if missed else []
    return page(
        "Mappers", *note, matrix(coverage, any_model=any_model), "<h2>All mappers</h2>", form, listing
    )


def matrix(coverage: Coverage, *, any_model: bool) -> str:
    """The directed table; rows are sources."""
    if not coverage.models and any_model:
        return '<p class="note">no models match</p>'
    if not coverage.models:
        return '<p class="note">no mappers yet: kvhub fit makes one, kvhub pull fetches one</p>'
    names = coverage.headings()
    head = "<th>source \\ target</th>" + "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(names[n])}</th>"
        + "".join("<td></td>" if s == t else _cell(coverage.cell(s, t)) for t in coverage.models)
        + "</tr>"
        for n, s in enumerate(coverage.models)
    )
    return (
        '<h2>Coverage</h2><div class="scroll"><table id="matrix">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if cell.row is None:
        return '<td class="missing">missing</td>'
    quality = cell.row.score("top1")
    parts = [cell.standing, *([f"top-1 {quality:.2f}"] if quality is not None else [])]
    parts += [output.size(cell.row.size), f"{cell.age_days(today()) or 0:.0f} d"]
    text = escape(", ".join(parts))
    where = f"/mapper/{cell.row.digest}"
    return f'<td class="{cell.standing}" title="{escape(cell.why)}"><a href="{where}">{text}</a></td>'


def mapper(row: MapperRow, history: Sequence[EventRecord], settings: Settings) -> str:
    """Everything known of one mapper."""
    manifest, evidence, problem = _files(row, settings)
    relative = row.regularization_convention == "relative-mean-diagonal"
    facts = [
        ("digest", f"<code>{row.digest}</code>"),
        ("source", _model(row.source.name, row.source.revision)),
        ("target", _model(row.target.name, row.target.revision)),
        ("state", escape(f"{row.state.value} since {output.instant(row.changed)}: {row.state_reason}")),
        ("method", escape(f"{row.family}, {row.support}, k = {row.k}")),
        ("lambda", escape(f"{row.regularization:g} ({'of the mean diagonal' if relative else 'absolute'})")),
        ("calibration", escape(f"{row.calibration.dataset}, {row.calibration.rows} rows")),
        ("size", output.size(row.size)),
        ("names", escape(", ".join(row.aliases)) or "-"),
        *(("repository", escape(f"{place.repo_id}@{place.commit}")) for place in row.locations),
    ]
    parts = [table(("", ""), facts)]
    if problem:
        parts.append(f'<p class="failing">{escape(problem)}</p>')
    parts += _scores(row, evidence)
    if manifest is not None:
        parts += _layers(manifest, evidence)
    parts += [
        f'<p><img alt="{escape(name)}" src="/mapper/{row.digest}/assets/{quote(name)}"></p>'
        for name in pictures(row, settings)
    ]
    events = [(output.instant(event.at), escape(event.what), escape(event.why)) for event in history]
    parts += ["<h2>History</h2>", table(("when", "what", "why"), events)]
    return page(f"{row.source.name} → {row.target.name}", *parts)


def pictures(row: MapperRow, settings: Settings) -> list[str]:
    """Plots that came with the artifact: plain PNG files of its assets, nothing else."""
    folder = files_of(row, settings) / "assets"
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(p.name for p in folder.glob("*.png") if p.is_file() and not p.is_symlink())


def link(row: MapperRow) -> str:
    """A mapper's short digest, leading to its page."""
    return f'<a href="/mapper/{row.digest}"><code>{row.digest[:12]}</code></a>'


def _model(name: str, revision: str) -> str:
    return f"{escape(name)} <code>{escape(revision)}</code>"


def _scores(row: MapperRow, evidence: Evidence | None) -> list[str]:
    if not row.scores:
        return ['<p class="note">not evaluated: kvhub eval measures it</p>']
    scores = [
        (
            escape(score.domain),
            escape(score.metric),
            escape(score.arm),
            f"{score.value:.4f}",
            "-" if score.low == score.high else f"{score.low:.4f} .. {score.high:.4f}",
            str(score.n),
        )
        for score in row.scores
    ]
    parts = ["<h2>Scores</h2>"]
    if evidence is not None:
        checks = [
            (
                escape(check.name),
                f"{check.found:.4g}",
                f"{check.limit:g}",
                escape(check.domain),
                "ok" if check.passed else "fails",
            )
            for check in evidence.verdict.checks
        ]
        parts.append(table(("gate", "found", "limit", "worst text", ""), checks, numbers=(1, 2)))
    heads = ("text", "metric", "arm", "value", "95 % interval", "n")
    return [*parts, table(heads, scores, numbers=(3, 4, 5))]


def _layers(manifest: Manifest, evidence: Evidence | None) -> list[str]:
    parts = ["<h2>Layers</h2>"]
    if evidence is not None and evidence.layers:
        cosine = [
            sum(layer.attention_cosine) / max(1, len(layer.attention_cosine)) for layer in evidence.layers
        ]
        parts.append(bars(cosine, "attention-output cosine by target layer"))
        parts.append(bars([layer.r2_key for layer in evidence.layers], "R2 of keys by target layer"))
        parts.append(bars([layer.r2_value for layer in evidence.layers], "R2 of values by target layer"))
    elif manifest.fit_scores.r2_key:
        parts.append(bars(manifest.fit_scores.r2_key, "R2 of keys by target layer (the fit's own)"))
        parts.append(bars(manifest.fit_scores.r2_value, "R2 of values by target layer (the fit's own)"))
    chosen = "; ".join(f"{t}←{','.join(map(str, c))}" for t, c in enumerate(manifest.source_layers))
    return [*parts, f"<p>target←source: <code>{escape(chosen)}</code></p>"]


def _files(row: MapperRow, settings: Settings) -> tuple[Manifest | None, Evidence | None, str]:
    directory: Path = files_of(row, settings)
    try:
        manifest = read_manifest(directory)
        if manifest.digest != row.digest:
            return None, None, f"its files are those of mapper {manifest.digest[:12]}"
        return manifest, read_evidence(directory, manifest), ""
    except KvhubError as error:
        return None, None, error.message
