"""The lock files hold what the project and SGLang's server ask for, and nothing that must stay apart."""

import re
import tomllib
from pathlib import Path

import pytest

requirements = pytest.importorskip("packaging.requirements")
utils = pytest.importorskip("packaging.utils")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"


def lines(name: str) -> list[str]:
    text = (FOLDER / name).read_text().splitlines()
    return [line for line in text if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    found = {}
    for name in ("torch", "dev", "sglang", "mooncake"):
        for line in lines(f"{name}.lock"):
            project, version = line.split("==")
            found[utils.canonicalize_name(project)] = version
    return found


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    return project["dependencies"] + [line for line in extras if not line.startswith("kvhub[")]


@pytest.mark.parametrize("line", [*declared(), *lines("dev.in"), *lines("torch.in"), *lines("sglang.in")])
def test_every_requirement_is_locked_to_a_version_that_fits(line: str) -> None:
    wanted = requirements.Requirement(line)
    locked = pins().get(utils.canonicalize_name(wanted.name))
    assert locked is not None, "run `make lock`"
    assert locked in wanted.specifier


def test_every_pin_is_exact() -> None:
    for name in ("torch.lock", "dev.lock", "sglang.lock", "mooncake.lock"):
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines(name)), name


def test_what_depends_on_the_index_stays_out_of_the_common_lock() -> None:
    """A CUDA build of torch brings its own CUDA libraries and another triton."""
    common = {utils.canonicalize_name(line.split("==")[0]) for line in lines("dev.lock")}
    assert not {name for name in common if re.match(r"(torch|triton|sglang)$|(nvidia|cuda)-", name)}
