"""No warnings of libraries before our own lines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly() -> Iterator[None]:
    """What transformers warns of while it reads a model's files is not shown.

    kvhub checks them itself and says what matters; the advice (another regular expression for a tokenizer
    that has none of that kind, keys that only another library knows) would mislead. TRANSFORMERS_VERBOSITY
    keeps it.
    """
    from transformers.utils import logging

    before = logging.get_verbosity()
    with warnings.catch_warnings():
        if "TRANSFORMERS_VERBOSITY" not in os.environ:
            warnings.simplefilter("ignore")
            logging.set_verbosity(max(before, logging.ERROR))
        try:
            yield
        finally:
            logging.set_verbosity(before)
