"""The pair and the text of a study, from the command line of a script that compares fits."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvhub.fit.settings import FitSettings, parse_k
from kvhub.study.pair import StudyPair, StudyText


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SOURCE, TARGET, the text and how it is cut; what is left out is as on the Qwen pair in the docs."""
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--other", type=Path, action="append", default=[], help="text that is not fitted on")
    parser.add_argument("--captures", type=Path, required=True)
    parser.add_argument("--name", default=None, help="of the pair; reversed for the way back")
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--k", default="8")
    parser.add_argument("--sequences", type=int, default=80)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--stride", type=int, default=2)
    parser.add_argument("--windows", type=int, default=18)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--tail", type=int, default=128)
    parser.add_argument("--tuning", type=int, default=12, help="windows to choose on")
    parser.add_argument("--dtype", default=None)


def directions(given: argparse.Namespace) -> list[tuple[StudyPair, str]]:
    """Each direction that was asked for, and its name."""
    import torch
    from transformers.utils import logging

    from kvhub.model.load import load_model

    logging.disable_progress_bar()
    settings = FitSettings(
        k=parse_k(given.k), sequences=given.sequences, length=given.length, stride=given.stride
    )
    dtype = getattr(torch, given.dtype) if given.dtype else None
    one, two = load_model(given.source, dtype), load_model(given.target, dtype)
    text = StudyText.cut(
        given.text, one.tokenizer, settings,
        windows=given.windows, prefix=given.prefix, tail=given.tail, others=given.other,
        tuning=given.tuning,
    )  # fmt: skip
    pair = StudyPair(one, two, text, settings, given.captures)
    names = given.name.split("->") if given.name else [one.identity.name, two.identity.name]
    there = [(pair, "->".join(names))]
    return [*there, (pair.reversed(), "->".join(reversed(names)))] if given.both else there
