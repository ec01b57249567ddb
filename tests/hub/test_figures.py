"""Pictures and the lines of the card that go with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from loopback_hub.store import Repo
from support.mappers import make_identity, make_manifest
from support.published import make_evidence, publishable

from kvhub.artifact.manifest import CurvePoint, FitScores, Selection
from kvhub.diagnostics.record import Diagnostics, KPoint, LayerMaps, write_diagnostics
from kvhub.evaluation.evidence import LayerScores
from kvhub.hub.card import NO_R2_BY_K, card
from kvhub.hub.figures import CURVE, DIAGNOSED, LAYERS, SELECTION, figures, title
from kvhub.hub.push import _files, push
from kvhub.settings import Settings

pytest.importorskip("matplotlib")


def point(k: int, strength: float) -> CurvePoint:
    return CurvePoint(
        k=k, regularization=strength, attention_cosine=0.9, attention_cosine_worst=0.7, kl=0.1 / k, top1=0.9
    )


def test_what_can_be_drawn_is_drawn_and_always_the_same() -> None:
    plain = make_manifest(make_identity(), make_identity())
    assert figures(plain, None) == {}
    fitted = plain.model_copy(
        update={"fit_scores": FitScores(rows=1, r2_key=[0.5, 0.6], r2_value=[0.4, 0.3])}
    )
    assert set(figures(fitted, None)) == {LAYERS}
    curve = [point(k, strength) for k in (1, 2) for strength in (1e-3, 1e-2)]
    chosen = Selection(k=2, regularization=1e-3, windows=1, tail=2, digest="e" * 64, curve=curve)
    both = fitted.model_copy(update={"selection": chosen})
    layers = [LayerScores(attention_cosine=[0.9, 0.8], r2_key=0.7, r2_value=0.6)] * 2
    evidence = make_evidence(both).model_copy(update={"layers": layers})
    made = figures(both, evidence)
    assert set(made) == {LAYERS, CURVE}
    assert all(data.startswith(b"\x89PNG") for data in made.values())
    assert figures(both, evidence) == made


def test_the_choice_of_k_is_shown_once(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    """A fit leaves a picture of it, too."""
    manifest = publishable(tmp_path / "plain")
    curve = [point(k, 1e-3) for k in (1, 2)]
    chosen = Selection(k=2, regularization=1e-3, windows=1, tail=2, digest="e" * 64, curve=curve)
    selected = manifest.model_copy(update={"selection": chosen})
    (tmp_path / "plain" / "assets").mkdir()
    (tmp_path / "plain" / "assets" / SELECTION).write_bytes(b"\x89PNG")
    assert set(_files(tmp_path / "plain", manifest, None)) >= {f"assets/{SELECTION}"}
    shown = [name for name in _files(tmp_path / "plain", selected, None) if name.startswith("assets/")]
    assert f"assets/{CURVE}" in shown and f"assets/{SELECTION}" not in shown
    assert title(SELECTION) == title(CURVE) != SELECTION


def test_what_was_diagnosed_is_on_the_card(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    manifest = publishable(tmp_path / "made")
    maps = LayerMaps(rows=9, raw_key=[[0.1, 0.2]] * 3, content_key=[[0.5, 0.6]] * 3, value=[[0.3, 0.4]] * 3)
    found = Diagnostics(
        mapper=manifest.digest,
        kvhub_version="0.1.0",
        created="2026-11-29T13:00:00Z",
        text="d" * 64,
        windows=1,
        prefix=8,
        tail=4,
        exact_prefix=0,
        scores=[],
        layers=[],
        positions=[],
        maps=maps,
        by_k=[KPoint(k=k, r2_key=0.5 + k / 10, r2_value=0.4) for k in (1, 2)],
    )
    write_diagnostics(tmp_path / "made", found)
    push(tmp_path / "made", "tester/mapper")
    tree = hub.store.repos["tester/mapper"].head.tree
    assert {f"assets/{name}" for name in DIAGNOSED} <= set(tree)
    readme = hub.store.blob(tree["README.md"]).read_text()
    assert "![What further source layers add](assets/r2_by_k.png)" in readme
    assert push(tmp_path / "made", "tester/mapper").commit == hub.store.repos["tester/mapper"].head.sha
    assert NO_R2_BY_K not in readme
    write_diagnostics(tmp_path / "made", found.model_copy(update={"by_k": []}))  # too few windows for it
    push(tmp_path / "made", "tester/mapper")
    tree = hub.store.repos["tester/mapper"].head.tree
    assert "assets/r2_by_k.png" not in tree
    assert NO_R2_BY_K in hub.store.blob(tree["README.md"]).read_text()
    (tmp_path / "made" / "assets" / "diagnostics.json").write_text("{")
    push(tmp_path / "made", "tester/mapper")
    assert f"assets/{DIAGNOSED[0]}" not in hub.store.repos["tester/mapper"].head.tree


def test_the_card_says_the_worst_text_and_both_licences(tmp_path: Path) -> None:
    manifest = publishable(tmp_path / "a")
    text = card(
        manifest, make_evidence(manifest), None, "org/m", licences={manifest.source.name: "apache-2.0"}
    )
    assert "Worst text: **" in text
    assert "org/Small-1B (`apache-2.0`) and org/Large-7B (see its own page)" in text


def test_licences_come_from_the_models_own_cards(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    hub.store.repos["org/Small-1B"] = repo = Repo("org/Small-1B")
    repo.add({"README.md": hub.store.put(b"---\nlicense: mit\n---\n")}, "a model")
    manifest = publishable(tmp_path / "made")
    assert manifest.source.revision.startswith("commit:")
    push(tmp_path / "made", "tester/mapper")
    readme = hub.store.blob(hub.store.repos["tester/mapper"].head.tree["README.md"]).read_text()
    assert "(`mit`)" in readme
    assert push(tmp_path / "made", "tester/mapper").commit == hub.store.repos["tester/mapper"].head.sha
