"""A Hugging Face Hub on the loopback, for tests and the demo: the real client talks to it.

    with LoopbackHub(root).serve() as hub:      # in this process
        hub.url
    python -m demo.loopback_hub --port 8765 --root DIR      # on its own

It speaks what `huggingface_hub` uses for model repositories over plain HTTP
(HF_HUB_DISABLE_XET=1): create, preupload, LFS upload, commit, tag, info, list,
resolve, with tokens, private and gated repositories. State is in memory, blobs
are on disk. One user: the token `hf_loopback` is `tester`. It is no place for
anything that must last.
"""

from .server import LoopbackHub
from .store import TOKEN, USER

__all__ = ["TOKEN", "USER", "LoopbackHub"]
