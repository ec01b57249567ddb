"""The model card: generated from manifest and evidence, never typed in.

Front matter as the Hub reads it: `base_model` with the relation `adapter`
(a list alone would read as a merge), the direction in tags, scores as a
model-index. Names come from a manifest that anybody may have written, so
everything printed here is escaped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from kvhub.artifact.manifest import Manifest
from kvhub.evaluation.evidence import ALL, Evidence, Score, Verdict
from kvhub.hub.figures import DIAGNOSED, title
from kvhub.hub.reference import Reference
from kvhub.model.identity import ModelIdentity

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_METRICS = (
    "excess_nll",
    "ppl_ratio",
    "kl",
    "top1",
    "gap_recovered",
    "attention_cosine",
    "attention_cosine_worst",
    "r2_key",
    "r2_value",
)
MAPS, BY_K = DIAGNOSED
NO_R2_BY_K = (
    "R2 by k is not shown: `kvhub diagnose` had too few windows for it (a k takes twice as many rows as it "
    "has features; `--windows` gives more)."
)
INDEXED = ("top1", "kl", "gap_recovered", "attention_cosine")


def card(
    manifest: Manifest,
    evidence: Evidence | None,
    verdict: Verdict | None,
    repo_id: str,
    *,
    licence: str | None = None,
    images: Sequence[str] = (),
    licences: Mapping[str, str] | None = None,
    subfolder: str = "",
    more: Mapping[str, Any] | None = None,
    beside: str = "",
) -> str:
    """README.md of a mapper's repository, or of its folder in one.

    verdict: our gate's, None without evidence (the card then says so). images:
    files under `assets/`. licences: what the models' own cards declare, by name.
    more: metadata of the mappers in this repository's folders (tags, base models, `kvhub`), put in;
    beside: the list of them, Markdown.
    """
    import yaml

    metadata = front_matter(manifest, evidence, repo_id, licence=licence)
    for key, value in (more or {}).items():
        metadata[key] = (
            {**metadata[key], **value}
            if key == "kvhub"
            else list(dict.fromkeys([*metadata.get(key, []), *value]))
        )
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    place = Reference(repo_id, subfolder).place
    parts = _body(manifest, evidence, verdict, place, licence, images, licences or {})
    if beside:
        parts += ["## More mappers in this repository", beside]
    body = "\n\n".join(parts)
    return f"---\n{front}---\n\n{body}\n"


def front_matter(
    manifest: Manifest, evidence: Evidence | None, repo_id: str, *, licence: str | None = None
) -> dict[str, Any]:
    """The card's metadata. There is no default licence: it depends on both models."""
    front: dict[str, Any] = {"library_name": "kvhub"}
    if licence:
        front["license"] = licence
    bases = [model.name for model in (manifest.target, manifest.source) if on_hub(model)]
    if bases:
        front["base_model"] = bases
        front["base_model_relation"] = "adapter"
    if _HUB_ID.fullmatch(manifest.calibration.dataset):
        front["datasets"] = [manifest.calibration.dataset]
    front["tags"] = [
        "kvhub",
        "kv-cache",
        "kv-cache-mapper",
        f"kvhub-source:{tag(manifest.source.name)}",
        f"kvhub-target:{tag(manifest.target.name)}",
        f"kvhub-family:{manifest.family}",
        f"kvhub-format:{manifest.schema_version}",
    ]
    front["kvhub"] = {
        "digest": manifest.digest,
        "source": {"name": text(manifest.source.name), "revision": manifest.source.revision},
        "target": {"name": text(manifest.target.name), "revision": manifest.target.revision},
        "family": manifest.family,
        "support": manifest.support,
        "k": manifest.k,
        "exact_prefix": manifest.exact_prefix,
    }
    results = _results(evidence) if evidence else []
    if results:
        front["model-index"] = [{"name": repo_id.partition("/")[2], "results": results}]
    return front


def tag(name: str) -> str:
    """A model's name as a tag: last component, lower case, safe characters."""
    slug = re.sub(r"[^a-z0-9._-]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-.")
    return slug or "unnamed"


def text(value: str) -> str:
    """One line of plain text."""
    return "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in value).strip()


def markdown(value: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", text(value))


def on_hub(model: ModelIdentity) -> bool:
    """Whether a model is named by a repository and a commit of the Hub."""
    return model.revision.startswith("commit:") and _HUB_ID.fullmatch(model.name) is not None


def served(model: ModelIdentity) -> str:
    """How `kvhub serve` is told to run a model: by its name on the Hub, else by a place to fill in."""
    return model.name if on_hub(model) else "TARGET"


def _results(evidence: Evidence) -> list[dict[str, Any]]:
    found = []
    for domain in sorted({score.domain for score in evidence.scores}):
        metrics = [
            {"type": metric, "name": metric, "value": round(score.value, 6), "verified": False}
            for metric in INDEXED
            if (score := evidence.score(metric, "mapped", domain)) is not None
        ]
        if metrics:
            dataset = {"type": "held-out-text", "name": text(domain)}
            task = {"type": "kv-cache-mapping", "name": "KV cache mapping"}
            found.append({"task": task, "dataset": dataset, "metrics": metrics})
    return found


def _body(
    manifest: Manifest,
    evidence: Evidence | None,
    verdict: Verdict | None,
    place: str,
    licence: str | None,
    images: Sequence[str],
    licences: Mapping[str, str],
) -> list[str]:
    source, target = markdown(manifest.source.name), markdown(manifest.target.name)
    return [
        f"# KV cache mapper: {source} to {target}",
        f"Turns the KV cache that **{source}** has computed into the one that **{target}** would have "
        "computed, so that a conversation can move from one to the other without a full prefill. "
        "It works in this direction and for exactly these revisions only.",
        f"```sh\nkvhub pull {place}\nkvhub serve {served(manifest.target)} --mapper {place}\n```",
        *_status(evidence, verdict),
        "## Pair",
        _pair(manifest),
        "## Method",
        _method(manifest),
        *_scores(evidence),
        *[f"![{markdown(title(name))}](assets/{name})" for name in images],
        *([NO_R2_BY_K] if MAPS in images and BY_K not in images else []),
        "## Limits",
        "The mapped cache is an approximation: answers differ from those of a native prefill, by as much "
        "as the scores say and on other text possibly by more. "
        + (
            f"The first {manifest.exact_prefix} positions must be the target's own. "
            if manifest.exact_prefix
            else ""
        )
        + "Any other revision, dtype, tokenizer or RoPE setting of either model is refused.",
        "## Licence",
        f"Declared: `{text(licence)}`." if licence else "None is declared here.",
        _licences((manifest.source, manifest.target), licences),
        "## Files",
        _table(("file", "bytes", "sha256"), [(f.name, str(f.size), f"`{f.sha256}`") for f in manifest.files]),
        f"Mapper digest (sha256 of manifest.json): `{manifest.digest}`",
        f"Made by kvhub {markdown(manifest.kvhub_version)} on {markdown(manifest.created)}.",
    ]


def _status(evidence: Evidence | None, verdict: Verdict | None) -> list[str]:
    if evidence is None or verdict is None:
        return ["> **Not evaluated.** Nothing is known of what this mapper costs; kvhub does not serve it."]
    if verdict.passed:
        return ["It passes kvhub's gate on every text below."]
    failed = "; ".join(
        f"{check.name} {check.found:.3g} (limit {check.limit:.3g}, {markdown(check.domain)})"
        for check in verdict.checks
        if not check.passed
    )
    return [f"> **It does not pass kvhub's gate:** {failed}. kvhub serves it only where that is overridden."]


def _licences(models: Sequence[ModelIdentity], licences: Mapping[str, str]) -> str:
    said = [
        f"{markdown(model.name)} (`{text(licences[model.name])}`)"
        if model.name in licences
        else f"{markdown(model.name)} (see its own page)"
        for model in models
    ]
    return f"The weights derive from {said[0]} and {said[1]}; the licences of both apply."


def worst_text(evidence: Evidence) -> str:
    """The text on which the mapped cache agrees least with the target's own; "" where there is but one."""
    found = [s for s in evidence.scores if (s.metric, s.arm) == ("top1", "mapped") and s.domain != ALL]
    if not found:
        return ""
    worst = min(found, key=lambda score: score.value)
    return (
        f"**{markdown(worst.domain)}**, top-1 agreement {worst.value:.3f} [{worst.low:.3f}, {worst.high:.3f}]"
    )


def _pair(manifest: Manifest) -> str:
    rows = []
    for role, model in (("source", manifest.source), ("target", manifest.target)):
        shape = model.geometry
        cache = f"{shape.num_layers} x {shape.num_kv_heads} x {shape.head_dim}"
        rows.append((role, markdown(model.name), f"`{model.revision}`", model.dtype, cache))
    return _table(("", "model", "revision", "dtype", "layers x KV heads x head dim"), rows)


def _method(manifest: Manifest) -> str:
    given = manifest.calibration
    relative = manifest.regularization_convention == "relative-mean-diagonal"
    rows = [
        ("family, support", f"{manifest.family}, {manifest.support}"),
        ("source layers per target layer (k)", str(manifest.k)),
        ("lambda", f"{manifest.regularization:g} ({'of the mean diagonal' if relative else 'absolute'})"),
        ("objective", markdown(manifest.objective)),
        ("exact prefix", f"{manifest.exact_prefix} positions"),
        ("weights", manifest.weights_dtype),
        (
            "calibration",
            markdown(given.dataset) + (f" at {markdown(given.revision)}" if given.revision else ""),
        ),
        (
            "calibration size",
            f"{given.sequences} x {given.length} tokens, every {given.stride}, {given.rows} rows",
        ),
        ("calibration sha256", f"`{given.digest}`"),
    ]
    return _table(("", ""), rows)


def _scores(evidence: Evidence | None) -> list[str]:
    if evidence is None:
        return []
    domains = [ALL, *sorted({score.domain for score in evidence.scores} - {ALL})]
    arms = list(dict.fromkeys(score.arm for score in evidence.scores))
    rows = []
    for domain in domains:
        for metric in ("nll", *_METRICS):
            for arm in arms:
                score = evidence.score(metric, arm, domain)
                if score is not None:
                    rows.append((markdown(domain), metric, arm, *_numbers(score)))
    return [
        "## Scores",
        f"Held-out text, {evidence.windows} windows; {markdown(evidence.protocol)}. Intervals: 95 %, "
        "paired bootstrap. Arms: `native` the target's own prefill, `source` the source alone, `mapped` "
        "this mapper, `empty` no prefix, `wrong-document` another document's mapped prefix.",
        *([f"Worst text: {worst}."] if (worst := worst_text(evidence)) else []),
        _table(("text", "metric", "arm", "value", "95 % interval", "n"), rows),
    ]


def _numbers(score: Score) -> tuple[str, str, str]:
    return f"{score.value:.4f}", f"{score.low:.4f} .. {score.high:.4f}", str(score.n)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
