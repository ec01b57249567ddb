"""What `kvhub doctor` looks at. Every check answers; none may end the others."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from kvhub.errors import KvhubError
from kvhub.files import unwritable
from kvhub.settings import Settings

Result = Literal["ok", "warns", "FAILS"]

SUPPORTED: tuple[tuple[str, str, str, str], ...] = (
    ("torch", "2.9", "", 'pip install "kvhub[torch]": needed to fit, evaluate and apply'),
    ("transformers", "5", "", 'pip install "kvhub[torch]"'),
    ("sglang", "0.5.23", "0.6", 'pip install "kvhub[sglang]": needed to serve'),
    ("huggingface-hub", "1.31", "3", "pip install -U huggingface-hub"),
    ("sqlmodel", "0.0.45", "", "pip install -U sqlmodel"),
    ("cryptography", "42", "", 'pip install "kvhub[sign]": needed for signatures'),
)
"""Package, least version, first version that is too new, advice."""

LOW = 20 << 30
"""Bytes of free disk below which a warning is due: one mapper takes up to 12 GB."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    result: Result
    found: str
    advice: str = ""


def examine(settings: Settings | None = None, *, ask_hub: bool = True) -> Iterator[Finding]:
    """All checks, one after the other."""
    settings = settings or Settings.load()
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("home", lambda: _home(settings)),
        ("disk", lambda: _disk(settings)),
        ("registry", lambda: _registry(settings)),
        ("mappers", lambda: _mappers(settings)),
        ("store", lambda: _store(settings)),
        ("trust", lambda: _trust(settings)),
    ]
    if ask_hub:
        checks.append(("hub", _hub))
    for name, check in checks:
        try:
            yield check()
        except KvhubError as error:
            yield Finding(name, "FAILS", error.message, error.hint)
        except OSError as error:
            said = unwritable(Path(error.filename or settings.home), error, "check its owner and its disk")
            yield Finding(name, "FAILS", said.message, said.hint)
        except Exception as error:
            yield Finding(
                name, "FAILS", f"{type(error).__name__}: {error}"[:200], "KVHUB_DEBUG=1 shows where"
            )
    yield Finding("python", "ok", platform.python_version())
    for package, least, limit, advice in SUPPORTED:
        yield _package(package, least, limit, advice)


def _home(settings: Settings) -> Finding:
    home = settings.home
    if not home.exists():
        return Finding("home", "ok", f"{home} (not made yet)")
    if not os.access(home, os.W_OK | os.X_OK):
        return Finding("home", "FAILS", f"{home} may not be written", "chown it, or set KVHUB_HOME")
    for place in (settings.mappers, home / "blobs"):
        if os.path.lexists(place) and not place.is_dir():
            return Finding("home", "FAILS", f"{place} is not a directory", "move it away")
    if home.stat().st_mode & 0o022:
        return Finding("home", "warns", f"{home} may be written by others", f"chmod go-w {home}")
    return Finding("home", "ok", str(home))


def _disk(settings: Settings) -> Finding:
    place = settings.home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free"
    return Finding(
        "disk", "ok" if free > LOW else "warns", found, "" if free > LOW else "kvhub gc; KVHUB_HOME"
    )


def _registry(settings: Settings) -> Finding:
    from kvhub.catalog import explained, reading_registry

    with explained(), reading_registry(settings) as registry:
        problem = registry.health()
        count = len(registry.list())
    where = "SQLite" if settings.database_url.startswith("sqlite") else "PostgreSQL"
    if problem:
        return Finding("registry", "FAILS", problem, "move the file away, then kvhub register")
    return Finding("registry", "ok", f"{where}, {count} mappers, consistent")


def _mappers(settings: Settings) -> Finding:
    from kvhub.artifact.read import verify_artifact
    from kvhub.catalog import explained, files_of, reading_registry
    from kvhub.store.collect import is_shared

    with explained(), reading_registry(settings) as registry:
        rows = registry.list(state="ready")
    shared = is_shared(settings)
    broken, elsewhere = [], 0
    for row in rows:
        directory = files_of(row, settings)
        if shared and not directory.exists():
            elsewhere += 1  # on the machine that has registered it
            continue
        try:
            if verify_artifact(directory, deep=False).digest != row.digest:
                broken.append(row.digest[:12])
        except KvhubError:
            broken.append(row.digest[:12])
    if broken:
        advice = "kvhub verify says of each what is wrong, and what repairs it"
        return Finding("mappers", "FAILS", f"ready but damaged: {', '.join(broken[:5])}", advice)
    others = f"; the files of {elsewhere} more are on other machines" if elsewhere else ""
    return Finding("mappers", "ok", f"{len(rows) - elsewhere} ready, names and sizes agree{others}")


def _store(settings: Settings) -> Finding:
    from kvhub.store.collect import collect

    waste = collect(settings, dry_run=True)
    if waste.unregistered:
        names = ", ".join(stray.path.name[:12] for stray in waste.unregistered[:5])
        found = f"{len(waste.unregistered)} mappers here are not registered: {names}"
        return Finding("store", "warns", found, "kvhub register puts them back")
    if waste.absent:
        found = f"{len(waste.absent)} lock files are missing: {', '.join(map(str, waste.absent[:3]))}"
        return Finding("store", "warns", found, "what they named is kept until kvhub gc gives them up")
    if waste.garbage:
        found = f"{len(waste.garbage)} things that nothing keeps, {waste.size / 1e6:.1f} MB"
        return Finding("store", "warns", found, "kvhub gc")
    return Finding("store", "ok", "nothing to collect")


def _trust(settings: Settings) -> Finding:
    from kvhub.store import signature, trust

    policy = trust.load(settings)
    if policy.require_signature and not signature.available():
        return Finding(
            "trust", "FAILS", "signatures are required but cannot be checked", 'pip install "kvhub[sign]"'
        )
    if policy.require_signature and not policy.publishers:
        return Finding("trust", "warns", "signatures are required of nobody", "kvhub trust NAME KEY")
    rule = "required" if policy.require_signature else "not required"
    return Finding("trust", "ok", f"signatures {rule}, {len(policy.publishers)} publishers")


def _hub() -> Finding:
    from kvhub.hub import client

    if client.offline():
        return Finding("hub", "warns", "offline (HF_HUB_OFFLINE)", "unset it to pull and push")
    from huggingface_hub import get_session, get_token

    hub = client.api()
    try:  # once, and not for long: somebody is waiting for the other lines
        get_session().get(f"{hub.endpoint}/api/models", params={"limit": 1}, timeout=5)
        name = hub.whoami().get("name") if get_token() else None
    except Exception as error:
        raise client.explain(error, client.SEARCH) from error
    if name is None:
        return Finding("hub", "ok", f"{hub.endpoint} answers; no token", client.LOGIN + " to push")
    return Finding("hub", "ok", f"{hub.endpoint}, logged in as {name}")


def _package(name: str, least: str, limit: str, advice: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "warns", "not installed", advice)
    if _number(found) < _number(least) or (limit and _number(found) >= _number(limit)):
        wanted = f">={least}" + (f",<{limit}" if limit else "")
        return Finding(name, "warns", f"{found}, supported is {wanted}", advice)
    return Finding(name, "ok", found)


def _number(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    parts = []
    for part in text.partition("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
