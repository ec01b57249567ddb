"""The page: everything inline, nothing loaded, everything that came from elsewhere escaped."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from kvhub.artifact.manifest import Manifest
from kvhub.diagnostics.buckets import by_bucket
from kvhub.diagnostics.record import Diagnostics
from kvhub.evaluation.evidence import ALL, ARMS, Evidence, Score
from kvhub.model.identity import ModelIdentity
from kvhub.report.pictures import TITLES
from kvhub.ui.page import STYLE, table

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_ARM_METRICS = (("excess_nll", "excess NLL"), ("kl", "KL"), ("top1", "top-1"))
_MAPPED = (
    ("excess_nll", "excess NLL, nat a token"),
    ("kl", "KL(native || mapped), nat"),
    ("top1", "top-1 agreement"),
    ("gap_recovered", "gap recovered"),
    ("attention_cosine", "attention-output cosine"),
    ("attention_cosine_worst", "worst layer"),
    ("r2_key", "R2 of keys"),
    ("r2_value", "R2 of values"),
)
_DIAGNOSED = (
    ("k_error_concentration", "K error concentration"),
    ("v_error_concentration", "V error concentration"),
    ("attention_kl", "attention KL, nat"),
    ("output_error", "attention-output error, share"),
    ("residual_error", "push on the residual stream, share"),
    ("key_error", "key error, share of spread"),
    ("value_error", "value error, share of spread"),
)


def report_page(
    manifest: Manifest,
    evidence: Evidence | None,
    diagnostics: Diagnostics | None,
    images: Mapping[str, bytes],
) -> str:
    """A whole HTML document without a script or an outside reference."""
    parts = [_recipe(manifest)]
    parts += _evidence(evidence) if evidence else ["<p class=note>No evidence yet: kvhub eval makes it.</p>"]
    if diagnostics:
        parts += _diagnosed(diagnostics)
    else:
        parts.append("<p class=note>No diagnostics yet: kvhub diagnose makes them.</p>")
    for name, data in images.items():
        text = escape(TITLES.get(name, name))
        encoded = base64.b64encode(data).decode()
        parts.append(
            f'<h2>{text}</h2><img alt="{text}" style="max-width:100%" src="data:image/png;base64,{encoded}">'
        )
    title = escape(f"{manifest.source.name} to {manifest.target.name}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvhub: {title}</title><style>{STYLE}</style></head>"
        f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def _recipe(manifest: Manifest) -> str:
    calibration = manifest.calibration
    lines = [
        ("mapper", f"<code>{escape(manifest.digest)}</code>"),
        ("source", _model(manifest.source)),
        ("target", _model(manifest.target)),
        ("family", escape(f"{manifest.family}, {manifest.support} support, k = {manifest.k}")),
        ("lambda", escape(f"{manifest.regularization:g} ({manifest.regularization_convention})")),
        ("objective", escape(manifest.objective)),
        ("exact prefix", str(manifest.exact_prefix)),
        ("weights", escape(f"{manifest.weights_dtype}, {manifest.size / 1e6:.1f} MB")),
        (
            "calibration",
            escape(
                f"{calibration.dataset}: {calibration.sequences} windows of up to {calibration.length}"
                f" tokens, one row in {calibration.stride}, {calibration.rows} rows"
            ),
        ),
        ("created", escape(f"{manifest.created}, kvhub {manifest.kvhub_version}")),
    ]
    return table(["recipe", ""], lines)


def _model(identity: ModelIdentity) -> str:
    shape = identity.geometry
    norm = ", k_norm" if shape.k_norm else ""
    return escape(
        f"{identity.name} {identity.revision[:20]} ({identity.architecture}, {identity.dtype}:"
        f" {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}{norm})"
    )


def _evidence(evidence: Evidence) -> list[str]:
    arms = []
    for arm in ARMS:
        nll = evidence.score("nll", arm)
        if nll is not None:
            perplexity = f"{math.exp(min(nll.value, 700)):.3f}"
            found = [_interval(evidence.score(metric, arm)) for metric, _ in _ARM_METRICS]
            arms.append([escape(arm), perplexity, *found])
    domains = [*sorted({score.domain for score in evidence.scores} - {ALL}), ALL]
    mapped = _by_domain(lambda metric, domain: evidence.score(metric, "mapped", domain), _MAPPED, domains)
    gate = [
        [
            escape(c.name),
            f"{c.found:.4g}",
            f"{c.limit:g}",
            escape(c.domain),
            "ok" if c.passed else "<b>fails</b>",
        ]
        for c in evidence.verdict.checks
    ]
    verdict = "passed the gate" if evidence.verdict.passed else "did not pass the gate"
    about = escape(f"{verdict}; {evidence.windows} windows, {evidence.protocol}; intervals 95 %")
    return [
        f"<h2>Evidence</h2><p>{about}</p>",
        table(["arm", "PPL", *(title for _, title in _ARM_METRICS)], arms, numbers=(1, 2, 3, 4)),
        "<h2>Mapped, by text</h2>",
        table(["", *domains], mapped, numbers=range(1, len(domains) + 1)),
        "<h2>Gate</h2>",
        table(["condition", "found", "limit", "worst text", ""], gate, numbers=(1, 2)),
    ]


def _diagnosed(found: Diagnostics) -> list[str]:
    domains = [*(profile.domain for profile in found.positions), ALL]
    rows = _by_domain(found.score, _DIAGNOSED, domains)
    groups = [name for name, _ in by_bucket(found.positions[0].key)] if found.positions else []
    positions = [
        [escape(f"{profile.domain}: {side}"), *(f"{v:.3f}" for _, v in by_bucket(getattr(profile, side)))]
        for profile in found.positions
        for side in ("key", "value")
    ]
    about = escape(
        f"{found.windows} windows, prefix {found.prefix}, tail {found.tail},"
        f" exact prefix {found.exact_prefix}; measured {found.created}"
    )
    return [
        f"<h2>Diagnostics</h2><p>{about}. None of these decides whether the mapper serves.</p>",
        table(["", *domains], rows, numbers=range(1, len(domains) + 1)),
        "<h2>Error by position, share of the layer's spread</h2>",
        table(["", *groups], positions, numbers=range(1, len(groups) + 1)),
    ]


def _by_domain(
    score: Callable[[str, str], Score | None], metrics: Iterable[tuple[str, str]], domains: Sequence[str]
) -> list[list[str]]:
    return [
        [escape(title), *(_interval(score(metric, domain)) for domain in domains)]
        for metric, title in metrics
    ]


def _interval(score: Score | None) -> str:
    return "-" if score is None else f"{score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
