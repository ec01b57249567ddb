"""A local JSONL file as a task of lm-evaluation-harness; nothing is fetched and nothing is cached.

One object a line, of one kind in the whole file:

    {"question": "...", "options": ["...", "..."], "gold": 1}   choose an option by log-likelihood
    the same, with one "_" in every question                    choose what to fill in (as WinoGrande)
    {"question": "...", "answer": "..."}                        write it; of "... #### 18" the 18 counts

The forms of the prompts are the harness's own for ARC, WinoGrande and GSM8K.
"""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from kvhub.errors import BadInput, NotFound

MAX_BYTES = 256 * 1024 * 1024
MAX_OPTIONS = 64


def read_items(path: Path) -> list[dict[str, Any]]:
    """The items of a file, checked. Errors: `NotFound`, `BadInput`."""
    lines = read_text(path).split("\n")  # splitlines() cuts at U+2028, legal in JSON
    items = [_item(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise BadInput(f"{path} has no items", "one JSON object a line")
    if len({"options" in item for item in items}) != 1:
        raise BadInput(f"{path} mixes items with options and without", "make two files")
    return items


def read_text(path: Path) -> str:
    """The text of a regular file of items, of a bounded size. Errors: `NotFound`, `BadInput`."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would wait for its writer, a device never ends
            raise BadInput(f"{path} is not a regular file", "give a JSONL file")
        if about.st_size > MAX_BYTES:
            raise BadInput(f"{path} is larger than {MAX_BYTES >> 20} MiB", "split it")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _item(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON may escape half a surrogate pair, which no tokenizer takes
        raise BadInput(f"{where} is not text: it holds half a character", "write it as UTF-8") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{where} is not JSON", "one JSON object a line") from None
    hint = 'give "question" with "options" and "gold", or with "answer"'
    if not isinstance(item, dict) or not isinstance(item.get("question"), str) or not item["question"]:
        raise BadInput(f"{where} has no question", hint)
    if "options" in item:
        options, gold = item["options"], item.get("gold")
        if not isinstance(options, list) or not 2 <= len(options) <= MAX_OPTIONS:
            raise BadInput(f"{where}: options must be 2 to {MAX_OPTIONS} strings", hint)
        if not all(isinstance(option, str) and option for option in options):
            raise BadInput(f"{where}: every option must be a string that is not empty", hint)
        if type(gold) is not int or not 0 <= gold < len(options):
            raise BadInput(f"{where}: gold must be the number of an option, from 0", hint)
        return {"question": item["question"], "options": options, "gold": gold}
    if not isinstance(item.get("answer"), str) or not item["answer"]:
        raise BadInput(f"{where} has neither options nor an answer", hint)
    return {"question": item["question"], "answer": item["answer"]}


def digest(items: list[dict[str, Any]]) -> str:
    """sha256 of the items as they are used."""
    return hashlib.sha256(json.dumps(items, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def chance(items: list[dict[str, Any]]) -> float:
    """Accuracy of guessing: the mean of 1 / options; 0 where an answer is written."""
    return sum(1 / len(item["options"]) if "options" in item else 0.0 for item in items) / len(items)


def task_config(name: str, items: list[dict[str, Any]], fewshot: int) -> dict[str, Any]:
    """The harness's configuration of a task over `items`; examples come from other items of the same file."""
    import datasets

    if fewshot >= len(items):
        raise BadInput(
            f"{name} has {len(items)} items, too few for {fewshot} examples", "use a smaller --fewshot"
        )
    config: dict[str, Any] = {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(items)},
        "test_split": "test",
        "fewshot_split": "test",
        "num_fewshot": fewshot,
    }
    if "options" not in items[0]:
        return config | {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["Question:", "\n\n"], "do_sample": False},
            "metric_list": [
                {
                    "metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
                    "ignore_case": True, "ignore_punctuation": False,
                    "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$", "^\\s+", "\\s+$"],
                }
            ],
        }  # fmt: skip
    config |= {"output_type": "multiple_choice"}
    if all(item["question"].count("_") == 1 for item in items):
        accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
        return config | {
            "doc_to_text": lambda doc: doc["gold"],
            "doc_to_choice": lambda doc: [
                doc["question"].split("_")[0] + option for option in doc["options"]
            ],
            "doc_to_target": lambda doc: doc["question"].split("_")[1].strip(),
            "metric_list": accuracy,
        }
    return config | {
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": lambda doc: doc["options"],
        "doc_to_target": "gold",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("acc", "acc_norm")
        ],
    }
