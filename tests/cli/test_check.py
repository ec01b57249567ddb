"""`kvhub check`: a verdict with reasons and costs, from files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi
from loopback_hub import TOKEN, LoopbackHub
from loopback_hub.store import Repo
from starlette.responses import PlainTextResponse
from support.mappers import make_manifest
from support.prose import write_text
from support.ropes import LONGROPE, make_rope
from support.tiny import TEXT, make_tiny

from kvhub.artifact.tensors import tensor_bytes
from kvhub.check import check
from kvhub.cli import run
from kvhub.model.identify import identify


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return (
        make_tiny(tmp_path / "small", layers=3, kv_heads=2),
        make_tiny(tmp_path / "large", layers=4, kv_heads=2, head_dim=24, hidden=64),
    )


def edit(path: Path, **changes: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def test_a_possible_pair(shell, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def forward(*arguments: object, **more: object) -> None:
        raise AssertionError("a module was called")

    monkeypatch.setattr(torch.nn.Module, "__call__", forward)
    done = shell.run("check", *pair, "--k", "2")
    assert "3 layers x 2 KV heads x 16" in done.stdout
    assert "4 layers x 2 KV heads x 24" in done.stdout
    assert "KV heads     matched (2)" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict      possible"


def test_json_and_the_numbers(shell, pair: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(shell.run("check", *pair, "--k", "2", "--json").stdout)
    assert json.loads(shell.run("check", *pair, "--k", "2", "--format", "json").stdout) == found
    assert (found["possible"], found["refusals"], found["matched_heads"]) == (True, [], True)
    source, target = (identify(path, dtype="bfloat16") for path in pair)
    assert found["source"]["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    assert found["target"]["geometry"]["head_dim"] == 24
    assert found["source"]["revision"] == source.revision
    for cost, features in zip(found["costs"], (2 * 2 * 16, 2 * 16), strict=True):
        made = make_manifest(source, target, k=2, support=cost["support"], weights_dtype="bfloat16")
        assert cost["artifact_bytes"] == tensor_bytes(made)
        assert cost["features"] == features
        assert (cost["rows_needed"], cost["rows_advised"]) == (features + 1, 4 * features)
        # One multiply and one add for each weight: 4 layers, K and V, features x (2 x 24).
        assert cost["map_flops"] == 2 * 4 * 2 * features * 48
    # q, k, v, o and the three of the MLP, 4 layers.
    hidden, inner, heads = 64, 128, 4
    layer = hidden * 24 * (2 * heads + 2 * 2) + 3 * hidden * inner
    assert found["target"]["layer_flops"] == 2 * 4 * layer
    assert found["fit_bytes"] > 16 * 3 * 32 * (3 * 32 + 4 * 48)


def test_unequal_heads(tmp_path: Path) -> None:
    one, other = make_tiny(tmp_path / "a", kv_heads=2), make_tiny(tmp_path / "b", kv_heads=4)
    found = check(str(one), str(other))
    assert (found.possible, found.matched_heads, [cost.support for cost in found.costs]) == (
        True,
        False,
        ["full"],
    )
    assert found.k == 3  # the default of 8 is more than the source has


def test_a_fit_with_unequal_heads_is_not_head_local(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one, other = make_tiny(tmp_path / "a", kv_heads=2), make_tiny(tmp_path / "b", kv_heads=4)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Document {number}. {TEXT}" for number in range(40)))
    arguments = ("--text", text, "--k", "1", "--length", "64")
    done = shell.run("fit", one, other, *arguments, "--support", "head-local", code=7)
    assert "equal KV head counts, not 2 and 4" in done.stderr


def test_k_beyond_the_source(shell, pair: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    done = shell.run("check", *pair, "--k", "4", code=2)
    assert "1..3" in done.stderr


def test_every_refusal_is_named_with_exit_code_7(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one = edit(make_tiny(tmp_path / "a"), layer_types=["sliding_attention"] * 3)
    other = edit(make_tiny(tmp_path / "b", vocab=300), model_type="deepseek_v3", kv_lora_rank=512)
    found = json.loads(shell.run("check", one, other, "--json", code=7).stdout)
    assert found["possible"] is False
    assert [(refused["where"], refused["code"]) for refused in found["refusals"]] == [
        ("source", "sliding_window"),
        ("target", "mla"),
        ("pair", "tokenizer"),
    ]
    shown = shell.run("check", one, other, code=7).stdout
    assert "[mla]" in shown
    assert shown.endswith("verdict      impossible\n")


def test_a_refused_kind_needs_no_tokenizer(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one, other = (
        edit(make_tiny(tmp_path / name), model_type="deepseek_v3", kv_lora_rank=512) for name in "ab"
    )
    for file in one.glob("token*"):
        file.unlink()
    found = json.loads(shell.run("check", one, other, "--json", code=7).stdout)
    assert [refused["code"] for refused in found["refusals"]] == ["mla", "mla"]


def test_vocabularies_of_one_size(tmp_path: Path) -> None:
    """Equal sizes prove nothing: two ids trade places."""
    one, other = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    found = check(str(one), str(other))
    assert [refused.code for refused in found.refusals] == ["tokenizer"]
    assert "2 of 320 ids differ" in found.refusals[0].message


def test_special_tokens_that_differ(tmp_path: Path) -> None:
    one, other = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b")
    file = other / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "a"}))
    assert "special tokens differ" in check(str(one), str(other)).refusals[0].message


def test_padded_vocabularies_are_allowed(tmp_path: Path) -> None:
    one, other = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b", vocab_size=512)
    assert check(str(one), str(other)).possible


def test_tokens_without_an_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published models have them (a pad token added later): only text that has one is refused."""
    from transformers import AutoTokenizer

    one, other = (make_tiny(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    for path in (one, other):
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.add_tokens([f"<|added {number}|>" for number in range(5)])  # three rows are spare
        tokenizer.save_pretrained(path)
    found = check(str(one), str(other))
    assert found.possible
    assert [note.split(" tokens of")[0] for note in found.notes] == ["source: 2", "target: 2"]
    plain, odd = write_text(tmp_path / "plain.txt", 150), tmp_path / "odd.txt"
    odd.write_text(plain.read_text().replace("\n", " <|added 4|>\n"))
    for text, code in ((plain, 0), (odd, 2)):
        arguments = ["fit", str(one), str(other), "--text", str(text), "--length", "64", "--sequences", "12"]
        arguments += ["--k", "1", "--stride", "1", "--distill", "0", "--output", str(tmp_path / text.stem)]
        assert run(arguments) == code
    assert "the text has token" in capsys.readouterr().err


def test_the_same_model_twice(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "a")
    found = check(str(path), str(path))
    assert found.possible
    assert found.notes == ["both are the same model: its cache can be used as it is, without a mapper"]


def test_notes_on_rope(tmp_path: Path) -> None:
    longrope = LONGROPE | {"original_max_position_embeddings": 512}
    one = make_rope(tmp_path / "a", "longrope", rope_parameters=longrope)
    other = make_rope(tmp_path / "b", "yarn attention_factor")
    found = check(str(one), str(other))
    assert found.possible
    assert found.source is not None
    assert found.source.rope.context == 512
    assert any("exact below position 512" in note for note in found.notes)
    assert any("target: not for serving" in note and "attention_factor" in note for note in found.notes)


def test_a_model_without_a_class_in_sglang(tmp_path: Path) -> None:
    from importlib.util import find_spec

    found = check(*(str(make_rope(tmp_path / name, "glm partial interleaved")) for name in "ab"))
    assert any("no class of its own for GlmForCausalLM" in note for note in found.notes)
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    models = Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py")
    named = "".join(file.read_text(encoding="utf-8") for file in models)
    assert "class GlmForCausalLM" not in named
    assert "class Glm4ForCausalLM" in named


def test_experts_have_no_prefill_share(tmp_path: Path) -> None:
    found = check(*(str(make_rope(tmp_path / name, "qwen3_moe")) for name in "ab"))
    assert found.target is not None
    assert found.target.layer_flops is None


def test_unknown_and_broken_models(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = make_tiny(tmp_path / "a")
    assert "no such model directory" in shell.run("check", path, tmp_path / "nothing", code=3).stderr
    broken = make_tiny(tmp_path / "b")
    (broken / "model.safetensors").write_bytes(b"\x01")
    assert "shorter than its header" in shell.run("check", path, broken, code=6).stderr


def test_on_the_hub_without_downloading_weights(  # type: ignore[no-untyped-def]
    shell, hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    api = HfApi(endpoint=hub.url, token=TOKEN)
    local = make_tiny(tmp_path / "local")
    for name, more in (("tester/one", {}), ("tester/sharded", {"shard": "40KB", "layers": 4})):
        path = make_tiny(tmp_path / name, **more)
        api.create_repo(name)
        api.upload_folder(repo_id=name, folder_path=path)
    done = shell.process("check", "tester/one", "tester/sharded", "--k", "1", "--json")
    found = json.loads(done.stdout)
    assert found["possible"] is True
    assert (found["source"]["name"], found["target"]["name"]) == ("tester/one", "tester/sharded")
    assert found["source"]["revision"].startswith("commit:")
    assert found["target"]["geometry"]["num_layers"] == 4
    at_home = check(str(local), str(local), k=1)
    assert at_home.source is not None
    assert found["source"]["weights_bytes"] == at_home.source.weights_bytes
    assert found["source"]["layer_flops"] == at_home.source.layer_flops
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


ASK = """
import json, os, sys
from kvhub.errors import KvhubError
from kvhub.model.resolve import resolve
for line in sys.stdin:
    model, os.environ["HF_TOKEN"] = line.split()
    try:
        resolve(model, weights=False)
        found = [0, "", ""]
    except KvhubError as error:
        found = [error.exit_code, error.message, error.hint]
    print(json.dumps(found), flush=True)
"""


def test_models_that_the_hub_does_not_give(shell, hub: LoopbackHub) -> None:  # type: ignore[no-untyped-def]
    """Every command takes its models from there in the same way."""
    hub.store.repos["tester/model"] = Repo("tester/model")
    gated = hub.store.repos["someone/gated"] = Repo("someone/gated", gated=True)
    for repo in (hub.store.repos["tester/model"], gated):
        repo.add({"config.json": hub.store.put(b"{}")}, "initial")
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=shell.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(model: str, token: str = TOKEN) -> tuple[int, str]:
            process.stdin.write(f"{model} {token}\n")
            process.stdin.flush()
            code, message, hint = json.loads(process.stdout.readline())
            assert "\n" not in message
            assert token not in message + hint
            return code, message

        assert ask("tester/absent") == (
            3,
            "no such model: tester/absent (neither a directory nor a Hub repository)",
        )
        assert ask("tester/model@v9") == (3, "tester/model has no revision 'v9'")
        assert ask("someone/gated") == (4, "someone/gated is gated")
        assert ask("tester/model", "hf_verysecret") == (4, "the Hub refuses tester/model (401)")
        for status, code in ((403, 4), (500, 5)):
            hub.faults[:] = [lambda request, status=status: PlainTextResponse("no", status)]
            assert ask("tester/model")[0] == code
            assert str(status) in ask("tester/model")[1]
        hub.faults.clear()
        assert ask("tester/model") == (0, "")
        process.stdin.close()
