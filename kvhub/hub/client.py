"""The Hub client: one API object, bounded retries, and its errors in our words.

The client is `huggingface_hub` 1.x or 2.x, whose transports differ (httpx,
httpx2): nothing here names one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

from kvhub import __version__
from kvhub.errors import AccessDenied, BadInput, Corrupt, KvhubError, NotFound, Unreachable
from kvhub.files import is_denied, is_full
from kvhub.hub import bounds, waits
from kvhub.hub.bounds import ASKED, LONGEST_WAIT
from kvhub.hub.reference import parse
from kvhub.model.resolve import quiet_client
from kvhub.settings import demand_endpoint
from kvhub.strict_json import shown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Answer = TypeVar("Answer")

ATTEMPTS = 4
SEARCH = "a search"
"""What is asked where it is of no repository."""
LOGIN = "set HF_TOKEN or run `hf auth login`"


class NoXet(Unreachable):
    """The Hub has no xet storage (one of a team's own): files go and come without it."""


@contextmanager
def without_xet() -> Iterator[None]:
    """Let the client send files as LFS has it, for the time of the block."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


def api() -> HfApi:
    """The client, its answers bounded; HF_ENDPOINT as it is now, not as it was at import.

    Errors: `BadInput` for an HF_ENDPOINT that is no address.
    """
    demand_endpoint()
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    quiet_client()
    bounds.install()
    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()  # one bar of ours, not one for each file
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None  # as the client itself takes it
    return HfApi(endpoint=endpoint, library_name="kvhub", library_version=__version__)


def offline() -> bool:
    """Whether the client was told not to use the network (HF_HUB_OFFLINE). Errors: as `api`."""
    demand_endpoint()
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def split(reference: str) -> tuple[str, str | None]:
    """`org/name[@revision]` as repository and revision. Errors: `BadInput`."""
    found = parse(reference)
    if found.subfolder:
        raise BadInput(f"{reference[:200]!r} is not a Hub repository", "write org/name, or org/name@revision")
    return found.repo_id, found.revision


def ask(
    what: str,
    call: Callable[[], Answer],
    *,
    revision: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Call the client, retrying 429, 5xx and lost connections a few times; anything else is final.

    what: the repository, for messages. Retry-After is honoured up to
    `LONGEST_WAIT`, and what the Hub sends is bounded (`kvhub.hub.bounds`).
    So is its silence (`kvhub.hub.waits`): after `waits.TOTAL` seconds in vain there is no other attempt.
    Errors: `NotFound`, `AccessDenied`, `Unreachable`, `Corrupt` (also an
    answer that no Hub gives), `BadInput`, `KvhubError`.
    """
    with bounds.within(what) as doing:
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except KvhubError:
                raise
            except Exception as error:
                wait = None if _lacks_xet(error) else _wait(error, attempt)
                if wait is None or attempt == ATTEMPTS - 1 or doing.lost >= waits.TOTAL:
                    raise explain(error, what, revision) from error
                sleep(wait)
    raise AssertionError("unreachable")


def explain(error: Exception, what: str, revision: str | None = None) -> KvhubError:
    """One of our errors for one of the client's."""
    from huggingface_hub import errors as hub

    error = _beneath(error)
    if isinstance(error, KvhubError):
        return error
    if isinstance(error, hub.HFValidationError):
        return BadInput(f"{what[:200]!r} is not a Hub repository", "write org/name")
    if isinstance(error, hub.OfflineModeIsEnabled):
        return Unreachable("the Hub client is offline", "unset HF_HUB_OFFLINE")
    if isinstance(error, hub.GatedRepoError):
        return AccessDenied(f"{what} is gated", f"ask for access on its page, then {LOGIN}")
    if isinstance(error, hub.RevisionNotFoundError):
        if revision is None:
            return NotFound(f"the Hub does not find the commit of {what} that it named", "try again")
        return NotFound(f"{what} has no revision {revision!r}", "a branch, a tag or a commit")
    if isinstance(error, hub.RepositoryNotFoundError):
        return NotFound(
            f"there is no repository {what} that you may see", f"check the name; if it is private, {LOGIN}"
        )
    if isinstance(error, hub.RemoteEntryNotFoundError):
        return NotFound(f"a file of {what} is not on the Hub", "the repository may have changed: try again")
    status = _status(error)
    if status is not None:
        asked = getattr(getattr(getattr(error, "response", None), "request", None), "method", "")
        return _by_status(
            status, what, getattr(error, "server_message", None), reads=asked in ("GET", "HEAD")
        )
    if "Consistency check failed" in str(error):
        return Corrupt(f"a file of {what} arrived with another length than the Hub announced", "try again")
    if is_full(error):
        return KvhubError(
            "the disk is full", "make room, or set KVHUB_HOME to another disk; nothing was kept"
        )
    if isinstance(error, OSError) and is_denied(error):
        return AccessDenied(f"may not write {error.filename}", "set KVHUB_HOME to a directory of yours")
    if _lacks_xet(error):
        return NoXet(f"the Hub has no xet storage for {what}", "set HF_HUB_DISABLE_XET=1")
    if "xet" in str(error).lower():
        return Unreachable(
            f"the Hub's xet storage does not answer for {what}", "try again with HF_HUB_DISABLE_XET=1"
        )
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        hint = (
            "try again later; it may be silent for HF_HUB_ETAG_TIMEOUT, or HF_HUB_DOWNLOAD_TIMEOUT, seconds"
        )
        return Unreachable(f"the Hub does not answer for {what}", hint)
    if _is_transport(error):
        return Unreachable(f"cannot reach the Hub for {what}", "check the network and HF_ENDPOINT")
    if isinstance(error, OSError | MemoryError) and not isinstance(error, hub.FileMetadataError):
        return KvhubError(f"the Hub client failed for {what}: {type(error).__name__}: {shown(error)}")
    return _nonsense(what, type(error).__name__)


def _nonsense(what: str, how: str) -> Corrupt:
    """For an answer that the client could not read: of a proxy, a log-in page, or somebody hostile."""
    return Corrupt(
        f"the answer for {what} is none that the Hub gives ({how})",
        "check HF_ENDPOINT, and whether a proxy or a log-in page answers in its place",
    )


def _by_status(status: int, what: str, said: str | None, *, reads: bool) -> KvhubError:
    """reads: whether it was asked to give something, not to take it."""
    detail = f": {shown(said.splitlines()[0])}" if said and said.strip() else ""
    if status == 401:
        return AccessDenied(f"the Hub does not accept the token for {what}", LOGIN)
    if status == 403:
        right = "with the right to write there" if not reads else "that may read there, or none"
        forbidden = what if what == SEARCH else f"this on {what}"
        return AccessDenied(f"the Hub forbids {forbidden}{detail}", f"use a token {right}")
    if status == 404 and what == SEARCH:
        return NotFound("there is no search at this Hub", "check HF_ENDPOINT")
    if status == 404:
        return NotFound(f"{what} is not on the Hub", "check the name, and that it was not deleted")
    if status in (409, 412):
        return KvhubError(f"{what} changed on the Hub in the meantime", "run the command again")
    if status < 400:
        return _nonsense(what, f"status {status}")
    if status == 429 or status >= 500:
        return Unreachable(f"the Hub answers {status} for {what}", "try again later")
    return KvhubError(f"the Hub refuses this on {what} ({status}){detail}")


def _beneath(error: Exception) -> Exception:
    """The reason, where the client says only what it failed in: "cannot find it locally", "upload of X"."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    wraps = isinstance(error, LocalEntryNotFoundError) or type(error) is RuntimeError
    return error.__cause__ if wraps and isinstance(error.__cause__, Exception) else error


def _wait(error: Exception, attempt: int) -> float | None:
    """Seconds until the next attempt, None where another would be pointless."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    error = _beneath(error)
    status = _status(error)
    if status is None:
        lost = _is_transport(error) and not isinstance(error, OfflineModeIsEnabled)
        return 2.0**attempt * random.uniform(0.5, 1.0) if lost else None
    if status != 429 and status < 500:
        return None
    response = getattr(error, "response", None)
    asked = _seconds(str(getattr(response, "extensions", {}).get(ASKED, "")))
    if asked is not None:
        return asked if asked <= LONGEST_WAIT else None
    return 2.0**attempt * random.uniform(0.5, 1.0)


def _seconds(asked: str) -> float | None:
    """What Retry-After asks for: seconds, or a date (RFC 9110, 10.2.3); None where it is neither."""
    if asked.isascii() and asked.isdigit():
        return float(asked)
    try:
        when = parsedate_to_datetime(asked)
        if when.tzinfo is None:  # "-0000": of no zone in particular
            when = when.replace(tzinfo=UTC)
        return max(0.0, (when - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):  # a date of no calendar
        return None


def _lacks_xet(error: Exception) -> bool:
    """Whether the place where the client fetches its key to xet storage is not there."""
    return _status(error) is None and "-token/" in str(error) and "xet" in str(error) and "404" in str(error)


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_transport(error: Exception) -> bool:
    # HTTPError is that of the transport in use.
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

    # LocalEntryNotFoundError comes after the client's own retries, so it is not a lost connection to us.
    known = (HTTPError, ConnectionError, TimeoutError)
    return isinstance(error, known) and not isinstance(error, LocalEntryNotFoundError)
