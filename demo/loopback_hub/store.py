"""Repositories, commits and blobs of the loopback Hub."""

from __future__ import annotations

import hashlib
import re
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import yaml

TOKEN = "hf_loopback"
USER = "tester"


class HubError(Exception):
    """An answer that is not 2xx: status, the Hub's `X-Error-Code`, a message."""

    def __init__(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


@dataclass(frozen=True)
class Entry:
    """A file of one commit; `oid` is its git blob id (of the pointer, for an LFS file)."""

    size: int
    oid: str
    lfs: str | None = None
    """sha256 of an LFS file."""

    def pointer_size(self) -> int:
        """Bytes of the LFS pointer that git would hold."""
        return len(lfs_pointer(str(self.lfs), self.size))


@dataclass(frozen=True)
class Commit:
    """One commit; `tree` maps path to file."""

    sha: str
    parent: str | None
    title: str
    date: str
    tree: dict[str, Entry]


@dataclass
class Repo:
    """One model repository."""

    id: str
    private: bool = False
    gated: bool = False
    created: str = field(default_factory=lambda: now())
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The namespace."""
        return self.id.split("/")[0]

    @property
    def head(self) -> Commit:
        """Newest commit of main."""
        return self.commits[self.branches["main"]]

    def commit(self, revision: str) -> Commit:
        """A commit by branch, tag or (abbreviated) sha."""
        sha = self.branches.get(revision) or self.tags.get(revision)
        if sha is None and re.fullmatch(r"[0-9a-f]{7,40}", revision):
            sha = next((known for known in self.commits if known.startswith(revision)), None)
        if sha is None:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[sha]

    def add(self, tree: dict[str, Entry], title: str, branch: str = "main") -> Commit:
        """A new commit on `branch`."""
        parent = self.branches.get(branch)
        sha = hashlib.sha1(uuid.uuid4().bytes).hexdigest()
        self.commits[sha] = Commit(sha, parent, title, now(), tree)
        self.branches[branch] = sha
        return self.commits[sha]


class Store:
    """All repositories, and their blobs under `root`."""

    def __init__(self, root: Path) -> None:
        self.git, self.lfs = root / "git", root / "lfs"
        for directory in (self.git, self.lfs):
            directory.mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()

    def put(self, data: bytes) -> Entry:
        """Keep a small file."""
        oid = git_oid(data)
        (self.git / oid).write_bytes(data)
        return Entry(len(data), oid)

    def blob(self, entry: Entry) -> Path:
        """Where the bytes of a file are; tests damage them here."""
        return self.lfs / entry.lfs if entry.lfs else self.git / entry.oid

    def put_file(self, repo_id: str, path: str, data: bytes) -> None:
        """Commit one file from the server's side, whatever its name (tests)."""
        repo = self.repos[repo_id]
        repo.add({**repo.head.tree, path: self.put(data)}, f"add {path}")

    def drop_file(self, repo_id: str, path: str) -> None:
        """Commit a deletion from the server's side (tests)."""
        repo = self.repos[repo_id]
        repo.add({name: entry for name, entry in repo.head.tree.items() if name != path}, f"drop {path}")

    def description(self, repo: Repo, commit: Commit) -> dict[str, object]:
        """What `GET /api/models/...` says, tags made from the card as the Hub does."""
        card = self._card(commit)
        bases = _list(card.get("base_model"))
        tags = [str(card["library_name"])] if card.get("library_name") else []
        tags += [str(tag) for tag in _list(card.get("tags"))]
        tags += [f"dataset:{name}" for name in _list(card.get("datasets"))]
        tags += [f"base_model:{base}" for base in bases]
        relation = card.get("base_model_relation") or ("merge" if len(bases) > 1 else "finetune")
        tags += [f"base_model:{relation}:{base}" for base in bases]
        tags += [f"license:{card['license']}"] if card.get("license") else []
        described = {
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.owner,
            "sha": commit.sha,
            "lastModified": commit.date,
            "createdAt": repo.created,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": list(dict.fromkeys(tags)),
            "cardData": card,
            "siblings": [{"rfilename": path} for path in sorted(commit.tree)],
        }
        for key in ("library_name", "model-index"):
            if key in card:
                described[key] = card[key]
        return described

    def _card(self, commit: Commit) -> dict[str, object]:
        entry = commit.tree.get("README.md")
        if entry is None:
            return {}
        match = front_matter(self.blob(entry).read_text("utf-8"))
        card = yaml.safe_load(match) if match else None
        return card if isinstance(card, dict) else {}


def front_matter(text: str) -> str | None:
    """The YAML block of a card."""
    match = re.match(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---", text, re.S)
    return match.group(1) if match else None


def git_oid(data: bytes) -> str:
    """git's blob id."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git holds in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def now() -> str:
    """As the Hub writes dates."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())


def _list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
