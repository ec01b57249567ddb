from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.prose import documents, write_text
from support.tiny import make_tokenizer

from kvhub.errors import BadInput
from kvhub.fit.calibration import calibration_set, load_corpora, make_corpora, row_positions
from kvhub.fit.overlap import RUN
from kvhub.fit.text import token_digest, windows


@pytest.mark.parametrize(
    ("stride", "exact", "expected"),
    [(4, 0, [0, 4, 8]), (4, 1, [4, 8]), (4, 4, [4, 8]), (4, 5, [8]), (1, 7, [7, 8, 9]), (3, 9, [9])],
)
def test_row_positions(stride: int, exact: int, expected: list[int]) -> None:
    assert list(row_positions(10, stride, exact)) == expected


def test_domains_are_sampled_evenly_and_a_short_one_is_made_up_for(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(320)
    paths = [
        write_text(tmp_path / "a.txt", 300, seed=1),
        write_text(tmp_path / "b.txt", 25, words=30, seed=2),
        write_text(tmp_path / "c.txt", 300, seed=3),
    ]
    corpora = load_corpora(paths)
    cut = calibration_set(corpora, tokenizer, sequences=180, length=64)
    assert cut.fit.shape == (180, 64)
    every = [{tuple(w) for w in windows(c.calibration, tokenizer, length=64).tolist()} for c in corpora]
    drawn = [sum(tuple(w) in side for w in cut.fit.tolist()) for side in every]
    assert drawn[1] == len(every[1]) < 60 and abs(drawn[0] - drawn[2]) <= 1 and sum(drawn) == 180


def test_the_sides_share_no_document(tmp_path: Path) -> None:
    shared = documents(100, seed=4)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(shared + documents(50, seed=ord(name))))
    (tmp_path / "sub").mkdir()
    again = write_text(tmp_path / "sub" / "a.txt", 50, seed=9)
    corpora = load_corpora([tmp_path / "a.txt", tmp_path / "b.txt", again])
    assert [c.name for c in corpora] == ["a", "b", "a~2"]
    calibration = {d for c in corpora for d in c.calibration}
    assert not calibration.intersection(d for c in corpora for d in c.held_out)
    assert all(c.held_out for c in corpora)


def test_what_is_chosen_and_scored_on_repeats_nothing_that_is_fitted_on() -> None:
    tokenizer = make_tokenizer(320)
    one, plain = documents(200, seed=1), documents(200, seed=2)
    # From the templates of the first file, with an end of their own: they fall on sides of their own.
    two = [f"{document} And so on to {number}." for number, document in enumerate(one)]
    corpora = make_corpora([("one", one), ("two", two), ("plain", plain)])
    cut = calibration_set(corpora, tokenizer, sequences=2000, length=256, tuning=True)

    def runs(rows: torch.Tensor | list[torch.Tensor]) -> set[tuple[str, ...]]:
        words = [tokenizer.decode(row.tolist()).split()[1:-1] for row in rows]
        return {tuple(w[start : start + RUN]) for w in words for start in range(len(w) - RUN + 1)}

    fitted, scored, chosen = runs(cut.fit), runs(cut.held_out), runs(cut.tuning)
    assert len(fitted) > 5000 and min(len(scored), len(chosen)) > 100
    assert not fitted & scored and not fitted & chosen


def test_text_of_one_template_leaves_nothing_to_score_or_choose_on() -> None:
    (template,) = documents(1, seed=3)
    (only,) = make_corpora([("one", [f"{template} {number}" for number in range(300)])])
    assert len(only.calibration) > 200 and only.held_out == []
    held_out = make_corpora([("other", documents(100, seed=4))])[0].held_out
    with pytest.raises(BadInput, match="the tuning side"):
        calibration_set(
            [replace(only, held_out=held_out)], make_tokenizer(320), sequences=8, length=64, tuning=True
        )


def test_the_same_text_gives_the_same_set_and_another_seed_another(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(320)
    path = write_text(tmp_path / "a.txt")
    sets = [
        calibration_set(load_corpora([path], seed=seed), tokenizer, sequences=20, length=32)
        for seed in (0, 0, 1)
    ]
    described = [s.describe(2, 4) for s in sets]
    assert described[0] == described[1] and described[0].digest != described[2].digest
    assert described[0].digest == token_digest([sets[0].fit])
    assert (described[0].rows, described[0].tokens) == (20 * 14, 20 * 32)
    assert described[0].dataset.startswith("a@")


def test_short_text_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(320)
    corpora = load_corpora([write_text(tmp_path / "a.txt", 30, words=5)])
    with pytest.raises(BadInput, match="held-out side of the text is shorter than one window of 200"):
        calibration_set(corpora, tokenizer, sequences=5, length=200)
    with pytest.raises(BadInput, match="calibration side"):
        calibration_set(corpora, tokenizer, sequences=5, length=20_000)


def test_windows_are_drawn_by_weight(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(320)
    paths = [write_text(tmp_path / f"{name}.txt", 300, seed=seed) for seed, name in enumerate("abc")]
    corpora = load_corpora(paths, weights=[2, 1, 1])
    cut = calibration_set(corpora, tokenizer, sequences=40, length=64)
    every = [{tuple(w) for w in windows(c.calibration, tokenizer, length=64).tolist()} for c in corpora]
    assert [sum(tuple(w) in side for w in list(cut.fit.tolist())) for side in every] == [20, 10, 10]
    first = [sum(tuple(w) in side for w in cut.fit[:8].tolist()) for side in every]
    assert first == [4, 2, 2]  # interleaved, so that every part of a fit sees every domain
    assert cut.dataset.count("@") == 3 and " x2, b@" in cut.dataset


def test_mixed_lengths_take_turns_and_share_no_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(320)
    corpora = load_corpora([write_text(tmp_path / "a.txt", 300)])
    cut = calibration_set(corpora, tokenizer, sequences=25, length=100, lengths=[20, 100, 50])
    assert [len(window) for window in cut.fit] == [20, 100, 50] * 8 + [20]
    packed = windows(corpora[0].calibration, tokenizer, length=170, limit=9).flatten().tolist()
    assert [token for window in cut.fit for token in window.tolist()] == packed[: 8 * 170 + 20]
    described = cut.describe(7, 0)
    assert (described.length, described.tokens, described.sequences) == (100, 8 * 170 + 20, 25)
    assert described.rows == 8 * (3 + 15 + 8) + 3
    assert described.digest == token_digest([list(cut.fit)]) != token_digest([cut.held_out])


def test_mixed_lengths_keep_the_tokenizer_s_head(tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    plain = make_tokenizer(320)
    backend = type(plain.backend_tokenizer).from_str(plain.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    corpora = load_corpora([write_text(tmp_path / "a.txt", 300)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    cut = calibration_set(corpora, tokenizer, sequences=10, length=50, lengths=[20, 50])
    assert [(len(window), int(window[0])) for window in cut.fit] == [(20, 0), (50, 0)] * 5
    with pytest.raises(BadInput, match="windows of 1 tokens"):
        calibration_set(corpora, tokenizer, sequences=10, length=50, lengths=[1, 50])
