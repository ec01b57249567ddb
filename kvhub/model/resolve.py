"""From what a user types to a model directory: a path, or `org/name[@revision]` on the Hub."""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path

from kvhub.errors import AccessDenied, BadInput, KvhubError, NotFound, Unreachable
from kvhub.files import is_denied, is_full
from kvhub.settings import demand_endpoint

_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")
_REVISION = re.compile(r"^[A-Za-z0-9][\w./-]{0,254}$")
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_PATTERNS = ["*.safetensors", *_SMALL]
_SECOND = ["consolidated*.safetensors"]
"""Mistral's second copy of the weights, which nothing here loads."""


def resolve(ref: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The directory of a model: `ref` itself, or the Hub snapshot of `org/name[@revision]`.

    An existing directory always wins. With `weights=False` only config and tokenizer are downloaded.
    Errors: `BadInput` (also an HF_ENDPOINT that is no address), `NotFound`, `AccessDenied`, `Unreachable`.
    """
    local = Path(ref).expanduser()
    if local.is_dir():
        if revision is not None:
            raise BadInput(f"{ref} is a directory and has no revision", "leave the revision out")
        return local.absolute()
    if local.is_file():
        raise BadInput(f"{ref} is a file", "give the directory that holds config.json and the weights")
    repository, separator, tag = ref.partition("@")
    if separator and Path(repository).expanduser().is_dir():
        raise BadInput(f"{repository} is a directory and has no revision", "leave out the @")
    revision = tag if separator else revision
    if not _REPOSITORY.match(repository):
        raise NotFound(
            f"no such model directory: {ref}", "give a directory, or a Hub id as org/name[@revision]"
        )
    if revision is not None and not _REVISION.match(revision):
        raise BadInput(f"{revision!r} is not a revision", "a branch, a tag or a commit")
    return _download(repository, revision, _PATTERNS if weights else _SMALL)


def _download(repository: str, revision: str | None, patterns: list[str]) -> Path:
    demand_endpoint()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from kvhub.hub import bounds

    quiet_client()
    bounds.install()
    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=_SECOND)
        )
    except KvhubError:  # of what bounds the client
        raise
    except HFValidationError:
        raise NotFound(f"no such model: {repository}") from None
    except LocalEntryNotFoundError as error:
        # The client says so of a Hub that refused just as of one that is not there.
        cause = error.__cause__
        of_disk = cause is not None and (is_full(cause) or is_denied(cause))
        if getattr(cause, "response", None) is not None or of_disk:
            raise explained(cause, repository, revision) from error
        raise Unreachable(
            f"cannot reach the Hub for {repository}, and it is not in the local cache",
            "check the network, or give a local directory",
        ) from None
    except Exception as error:
        raise explained(error, repository, revision) from error


def quiet_client() -> None:
    """The client's warnings would stand before our one line and say the same; HF_HUB_VERBOSITY keeps them."""
    from huggingface_hub.utils.logging import set_verbosity

    if "HF_HUB_VERBOSITY" not in os.environ:
        set_verbosity(logging.CRITICAL)
        warnings.filterwarnings("ignore", module=r"huggingface_hub(\.|$)")


def explained(error: BaseException | None, repository: str, revision: str | None) -> KvhubError:
    """What an error of the Hub's client means, in one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hint = "log in with `hf auth login` and accept the model's terms on its page"
    if isinstance(error, GatedRepoError):
        return AccessDenied(f"{repository} is gated", hint)
    if isinstance(error, RevisionNotFoundError):
        if revision is None:
            return NotFound(f"the Hub does not find the commit of {repository} that it named", "try again")
        return NotFound(f"{repository} has no revision {revision!r}")
    if isinstance(error, RepositoryNotFoundError):
        return NotFound(f"no such model: {repository} (neither a directory nor a Hub repository)", hint)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return AccessDenied(f"the Hub refuses {repository} ({status})", hint)
    if status == 404:
        return NotFound(f"{repository} is not on the Hub")
    if status is not None:
        return Unreachable(f"the Hub answered {status} for {repository}", "try again later")
    if error is not None and is_denied(error):
        from huggingface_hub import constants

        place = getattr(error, "filename", None) or constants.HF_HUB_CACHE
        return AccessDenied(
            f"cannot store {repository}: the Hub's cache cannot be written ({place})",
            "set HF_HOME to a directory of yours",
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return KvhubError(
            f"cannot store {repository}: {error.strerror}", "free some disk space, or set HF_HOME"
        )
    # The client's transport (httpx in one major version, httpx2 in the next) has its own exceptions.
    return Unreachable(f"cannot reach the Hub for {repository}: {type(error).__name__}", "check the network")
