"""The read-only pages: what they show, what they refuse, and how a real browser sees them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stored import stored

from kvhub.artifact.manifest import Manifest
from kvhub.settings import Settings
from kvhub.store.lifecycle import name

pytest.importorskip("starlette")

EVIL = "org/<script>alert(1)</script>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("ui")
    return Settings(root / "home", f"sqlite:///{root}/home/registry.db", False)


@pytest.fixture(scope="module")
def mappers(home: Settings) -> list[Manifest]:
    made = [
        stored(home, 1, source="Qwen/Qwen3-8B", target="Qwen/Qwen3-32B"),
        stored(home, 2, source="Qwen/Qwen3-32B", target="Qwen/Qwen3-8B", top1=0.5),
        stored(home, 3, source=EVIL, target="Qwen/Qwen3-8B", top1=None),
    ]
    name("prod", made[0].digest, why="", settings=home)
    assets = home.mappers / made[0].digest / "assets"
    assets.mkdir()
    (assets / "r2.png").write_bytes(PNG)
    (assets / "link.png").symlink_to("/etc/passwd")
    return made


@pytest.fixture(scope="module")
def url(home: Settings, mappers: list[Manifest]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvhub", "ui", "--port", "0"],
        env={"PATH": "/usr/bin:/bin", "KVHUB_HOME": str(home.home), "HOME": str(home.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:"), process.communicate()
    yield address
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "Traceback" not in err


def get(address: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode("utf-8", "replace"), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace"), dict(error.headers)


def test_the_matrix_and_the_list(url: str, mappers: list[Manifest]) -> None:
    status, body, headers = get(url)
    assert status == 200
    assert "ready, top-1 0.95" in body
    assert "failing, top-1 0.50" in body
    assert all(f'href="/mapper/{manifest.digest}"' in body for manifest in mappers)
    assert "<script" not in body
    assert "&lt;script&gt;" in body
    lower = {key.lower(): value for key, value in headers.items()}
    assert "default-src 'none'" in lower["content-security-policy"]


def test_search(url: str, mappers: list[Manifest]) -> None:
    found = json.loads(get(f"{url}/mappers.json?q=prod")[1])
    assert [row["digest"] for row in found] == [mappers[0].digest]
    body = get(f"{url}/?q=%22%3E%3Cscript%3E")[1]
    assert "<script" not in body
    assert "no mapper matches" in body


def test_a_page_of_a_mapper(url: str, mappers: list[Manifest]) -> None:
    for reference in (mappers[0].digest, "@prod"):
        status, body, _ = get(f"{url}/mapper/{reference}")
        assert status == 200
        assert mappers[0].digest in body
    assert "0.9500" in body
    assert "better-than-source" in body
    assert "alias prod" in body
    assert "<svg" in body
    assert body.count("/assets/") == 1
    assert get(f"{url}/mapper/{mappers[0].digest}/assets/r2.png")[0] == 200
    for wrong in ("link.png", "absent.png", "..%2f..%2fmanifest.json", "%2e%2e%2fmanifest.json"):
        assert get(f"{url}/mapper/{mappers[0].digest}/assets/{wrong}")[0] == 404, wrong
    assert get(f"{url}/mapper/ffffffff")[0] == 404


def test_it_only_reads_and_only_for_its_own_name(url: str, mappers: list[Manifest]) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        request = urllib.request.Request(url, method=method, data=b"")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code == 405
    assert get(url, Host="evil.example.org")[0] == 400


def test_mappers_that_the_registry_lost_are_said(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from kvhub.ui.app import application

    home = Settings(tmp_path, f"sqlite:///{tmp_path}/registry.db", False)
    stored(home, 1, source="Qwen/Qwen3-8B", target="Qwen/Qwen3-32B")
    stored(home, 2, source="Qwen/Qwen3-32B", target="Qwen/Qwen3-8B")
    client = TestClient(application(home), base_url="http://localhost")
    assert "not registered" not in client.get("/").text
    (tmp_path / "registry.db").rename(tmp_path / "kept.db")
    assert "are not registered: kvhub register puts them back" in client.get("/").text
    stored(home, 3, source="Qwen/Qwen3-8B", target="Qwen/Qwen3-14B")  # a new registry, of one
    assert "2 mappers in" in client.get("/").text
    assert "2 mappers in" in client.get("/mapper/ffffffff").text
    for part in ("-wal", "-shm"):
        (tmp_path / f"registry.db{part}").unlink(missing_ok=True)
    (tmp_path / "registry.db").write_bytes(b"")
    for page in ("/", "/mapper/ffffffff"):
        found = client.get(page)
        assert found.status_code == 404 and "is empty" in found.text and "3 mappers in" in found.text


def test_what_does_not_match_and_what_fits_several(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from kvhub.ui.app import application

    home = Settings(tmp_path, f"sqlite:///{tmp_path}/registry.db", False)
    pair = {"source": "Qwen/Qwen3-8B", "target": "Qwen/Qwen3-32B"}
    made = [stored(home, seed, **pair) for seed in (1, 2)]
    client = TestClient(application(home), base_url="http://localhost")
    for page in ("/?family=zzz", "/?family=zzz&q=x"):
        assert "no models match" in client.get(page).text and "no mappers yet" not in client.get(page).text
    found = client.get("/mapper/qwen3-8b->qwen3-32b")
    assert found.status_code == 400 and all(one.digest[:12] in found.text for one in made)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
def test_a_real_browser(url: str, mappers: list[Manifest], tmp_path: Path) -> None:
    """Style and pictures pass the content policy, nothing runs, and the search form works."""

    def browse(address: str, *options: str) -> str:
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path}/profile", "--window-size=1200,1400", *options, address,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "Content Security Policy" not in done.stderr
        return done.stdout

    page = browse(url, "--dump-dom", "--enable-logging=stderr")
    assert page.count("<tr>") >= 7
    assert "&lt;script&gt;" in page
    found = browse(f"{url}/?q=prod", "--dump-dom")
    assert f"/mapper/{mappers[0].digest}" in found
    shot = tmp_path / "page.png"
    browse(f"{url}/mapper/{mappers[0].digest}", f"--screenshot={shot}", "--enable-logging=stderr")
    assert shot.stat().st_size > 10_000
