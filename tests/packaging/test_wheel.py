"""What is in the wheel that people install, and what is not."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kvhub", "kvhub_registry", "kvhub_kernels", "kvhub_sglang"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_exactly_the_four_packages(names: list[str]) -> None:
    folders = {name.split("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == PACKAGES


def test_every_package_is_typed_and_the_migrations_ship(names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.startswith("kvhub_registry/migrations/") for name in names)


def test_nothing_of_the_development_stand_ins_ships(names: list[str]) -> None:
    assert not [name for name in names if "sgl_kernel" in name or "sglang_cpu" in name]


@pytest.mark.parametrize("folder", ["kernels", "registry", "sglang_ext"])
def test_top_level_folders_are_not_packages(folder: str) -> None:
    """`kernels/__init__.py` would shadow Hugging Face's `kernels`, which transformers imports."""
    assert not (ROOT / folder / "__init__.py").exists()
