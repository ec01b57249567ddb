"""The report: self-contained, escaped, and as a real browser sees it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.mappers import identity_tensors, make_identity, make_manifest
from support.published import make_evidence

from kvhub.artifact.evidence import write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.write import write_artifact
from kvhub.cli import run
from kvhub.diagnostics.record import (
    NAME,
    Diagnostics,
    KPoint,
    LayerDiagnosis,
    LayerMaps,
    PositionProfile,
    write_diagnostics,
)
from kvhub.evaluation.evidence import LayerScores, Score
from kvhub.report.page import report_page
from kvhub.report.pictures import TITLES, pictures
from kvhub.report.write import write_report

EVIL = "org/<script>alert(1)</script>\"'$x^2$"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tags, text and every reference."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def diagnostics(manifest: Manifest, domain: str = "wiki") -> Diagnostics:
    layer = LayerDiagnosis(
        attention_cosine=[0.9, 0.7, 0.8, 0.6], key_concentration=[1.0, 2.0, 1.5, 1.2],
        value_concentration=[0.5, 0.9, 1.1, 1.3], attention_kl=[0.1] * 4, output_error=[0.2] * 4,
        residual_error=0.01, key_error=0.3, value_error=0.4,
    )  # fmt: skip
    scores = [
        Score(metric=metric, arm="mapped", domain=of, value=1.25, low=1.0, high=1.5, n=40)
        for metric in ("k_error_concentration", "residual_error")
        for of in (domain, "all")
    ]
    return Diagnostics(
        mapper=manifest.digest, kvhub_version="0", created="2026-01-01T00:00:00+00:00", text="d" * 64,
        windows=4, prefix=10, tail=5, exact_prefix=0, scores=scores, layers=[layer, layer],
        positions=[PositionProfile(domain=domain, key=[0.5] * 10, value=[0.25] * 10)],
        maps=LayerMaps(
            rows=40, raw_key=[[0.1, 0.2]] * 2, content_key=[[0.3, 0.4]] * 2, value=[[0.5, 0.6]] * 2
        ),
        by_k=[KPoint(k=1, r2_key=0.5, r2_value=0.4), KPoint(k=2, r2_key=0.6, r2_value=0.5)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """An artifact whose every line for people is hostile."""
    directory = tmp_path_factory.mktemp("report") / "mapper"
    source, target = make_identity(EVIL), make_identity("org/target")
    manifest = write_artifact(
        directory,
        made := make_manifest(source, target, objective="<img src=x onerror=alert(1)>"),
        identity_tensors(made),
    )
    layers = [LayerScores(attention_cosine=[0.9, 0.8], r2_key=0.7, r2_value=0.6)] * 2
    evidence = make_evidence(manifest).model_copy(update={"layers": layers, "protocol": "<b>bold</b>"})
    write_evidence(directory, evidence)
    write_diagnostics(directory, diagnostics(manifest, "</td><script>"))
    return directory, manifest


@pytest.fixture(scope="module")
def written(hostile: tuple[Path, Manifest]) -> Path:
    pytest.importorskip("matplotlib")
    path = hostile[0].parent / "out" / "page.html"
    found = write_report(hostile[0], path, hostile[0].parent / "pictures")
    assert [file.name for file in found[1:]] == [name for name in TITLES if name != "choice.png"]
    return path


def test_it_is_one_file_and_hostile_text_is_text(written: Path, hostile: tuple[Path, Manifest]) -> None:
    text = written.read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "form", "base"} & set(page.tags)
    assert page.tags.count("img") == 6
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not re.search(r"https?://|url\(|@import", text)
    assert EVIL in page.text and "<img src=x onerror=alert(1)>" in page.text
    assert "</td><script>" in page.text and "<b>bold</b>" in page.text
    assert hostile[1].digest in page.text


def test_it_says_what_was_measured(written: Path) -> None:
    text = Page(written.read_text()).text
    for expected in ("wrong-document", "k = 1", "1.250 [1.000, 1.500]", "better-than-source", "4-9", "0.250"):
        assert expected in text, expected


def test_the_pictures_are_pictures_and_always_the_same(written: Path, hostile: tuple[Path, Manifest]) -> None:
    folder = hostile[0].parent / "pictures"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert all(data.startswith(b"\x89PNG") and len(data) > 5000 for data in before.values())
    write_report(hostile[0], written, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(folder.glob(".*"))


def test_without_evidence_or_diagnostics() -> None:
    manifest = make_manifest(make_identity(), make_identity("org/other"))
    page = Page(report_page(manifest, None, None, {}))
    assert "kvhub eval makes it" in page.text and "kvhub diagnose makes them" in page.text
    assert "img" not in page.tags
    pytest.importorskip("matplotlib")
    assert pictures(manifest, None, None) == {}


def test_layers_of_unequal_width_are_left_out(hostile: tuple[Path, Manifest]) -> None:
    pytest.importorskip("matplotlib")
    found = diagnostics(hostile[1])
    ragged = found.layers[0].model_copy(update={"attention_cosine": [0.5], "key_concentration": []})
    made = pictures(
        hostile[1], None, found.model_copy(update={"layers": [*found.layers, ragged], "maps": None})
    )
    assert set(made) == {"layers.png", "positions.png", "r2_by_k.png"}


@pytest.mark.parametrize(
    "change",
    [
        {"raw_key": [], "content_key": []},
        {"raw_key": [], "content_key": [], "value": []},
        {"raw_key": [[]], "content_key": [[]], "value": [[]]},
        {"value": [[0.5, 0.6], [0.5]]},
        {"value": [[0.5, 0.6]]},
        {"value": [[0.5]] * 2},
    ],
)
def test_maps_of_no_one_shape_are_refused(hostile: tuple[Path, Manifest], change: dict[str, Any]) -> None:
    found = diagnostics(hostile[1]).model_dump(mode="json")
    found["maps"] |= change
    with pytest.raises(ValidationError, match="one shape"):
        Diagnostics.model_validate_json(json.dumps(found))


def test_the_command(
    hostile: tuple[Path, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = make_manifest(make_identity(), make_identity("org/target"))
    directory = tmp_path / "plain"  # without a picture, which is what takes time
    manifest = write_artifact(directory, made, identity_tensors(made))
    assert run(["report", str(directory)]) == 0
    assert capsys.readouterr().out == f"report-{manifest.digest[:12]}.html\n"
    assert (tmp_path / f"report-{manifest.digest[:12]}.html").stat().st_size > 1000
    (tmp_path / "link").symlink_to("elsewhere")
    for place in (f"{directory}/manifest.json/x.html", "n" * 257, "", "link", "/dev/null"):
        assert run(["report", str(directory), "--output", place]) == 2, place
        assert len(capsys.readouterr().err.splitlines()) <= 2
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "elsewhere").exists()
    assert run(["report", "nothing-like-it"]) == 3
    changed = shutil.copytree(hostile[0], tmp_path / "changed")
    content = json.loads((changed / NAME).read_text()) | {"mapper": "0" * 64}
    (changed / NAME).write_text(json.dumps(content))
    assert run(["report", str(changed)]) == 6


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
def test_a_real_browser(written: Path, tmp_path: Path) -> None:
    """The page's own content policy lets its style and pictures through, and nothing runs."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr", "--window-size=1200,3000",
    ]  # fmt: skip
    shot = tmp_path / "page.png"
    done = subprocess.run(
        [*command, f"--screenshot={shot}", written.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Content Security Policy" not in done.stderr
    assert shot.stat().st_size > 50_000
