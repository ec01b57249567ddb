import importlib.util
from pathlib import Path

import pytest

from kvhub.serving import cpu


def test_the_environment_decides_before_the_machine() -> None:
    assert cpu.wanted({"SGLANG_USE_CPU_ENGINE": "1"})
    assert not cpu.wanted({"SGLANG_USE_CPU_ENGINE": "0"})


def test_without_a_word_the_driver_decides() -> None:
    driver = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    assert cpu.wanted({}) is not driver


@pytest.mark.parametrize("given", [("--max-total-tokens", "512"), ("--max-total-tokens=512",)])
def test_a_given_pool_size_is_kept(given: tuple[str, ...]) -> None:
    assert cpu.flags(given) == ["--sleep-on-idle"]


def test_the_pool_is_bounded_by_default() -> None:
    assert cpu.flags(("--max-total-tokens-of-something", "1", "--sleep-on-idle")) == [
        "--max-total-tokens",
        str(cpu.MAX_TOTAL_TOKENS),
    ]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_served_architecture_stays_enabled() -> None:
    disabled = cpu.variables(["Qwen3ForCausalLM"])["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "qwen3" not in disabled
    assert {"llama", "gemma2"} <= set(disabled)
