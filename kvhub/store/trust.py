"""Whose mappers this machine takes: `trust.json` in KVHUB_HOME, or where KVHUB_TRUST says.

    {"require_signature": true, "publishers": {"our team": "<public key, hex>"}, "namespaces": ["our-org"]}

With `require_signature` (or KVHUB_REQUIRE_SIGNATURE=1) a mapper must carry a valid signature by a listed
publisher to be pulled, promoted, verified or loaded. `namespaces`, where given, are the only Hub
organisations that pull takes from. A signature that is there but wrong is refused in any case.

A policy that cannot be read says nothing of any mapper: it is `BadInput`, never `Corrupt`, and commands that
change a mapper's state read it first.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from kvhub.artifact.manifest import Manifest
from kvhub.errors import BadInput, Corrupt, Incompatible, NotFound
from kvhub.files import write_bytes, writing
from kvhub.model.identity import Record, Text
from kvhub.settings import Settings
from kvhub.store import signature as signatures
from kvhub.strict_json import first_fault, parse_object, read_bounded, shown

Status = Literal["unsigned", "unchecked", "unknown", "trusted"]
_MEND = "mend the file, or move it away and write it anew: kvhub trust NAME KEY --require"
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Policy(Record):
    """The file."""

    require_signature: bool = False
    publishers: dict[Text, PublicKey] = Field(default_factory=dict)
    namespaces: list[Text] | None = None

    def publisher(self, key: str) -> str | None:
        """The name of a key's owner."""
        return next((name for name, known in self.publishers.items() if known == key), None)


@dataclass(frozen=True)
class Provenance:
    """What is known of a mapper's origin.

    `unchecked`: signed, but the library to check it is not installed; `unknown`: validly signed by a key
    that the policy does not list.
    """

    status: Status
    key: str | None = None
    publisher: str | None = None

    def __str__(self) -> str:
        if self.status == "trusted":
            return f"signed by {self.publisher} ({str(self.key)[:12]})"
        if self.status == "unknown":
            return f"validly signed by a key that this machine does not know ({str(self.key)[:12]})"
        return "signed, not checked: cryptography is not installed" if self.key else "not signed"


def path(settings: Settings) -> Path:
    """Where the policy is."""
    given = os.environ.get("KVHUB_TRUST")
    return Path(given).expanduser() if given else settings.home / "trust.json"


def load(settings: Settings | None = None, *, absent: bool = False) -> Policy:
    """The policy of this machine; without a file in KVHUB_HOME everything is allowed.

    absent: take a file that KVHUB_TRUST names and that is not there as an empty one, to write it.
    Errors: `BadInput` for a file that was named and is not there, or that is no policy; `AccessDenied`.
    """
    file = path(settings or Settings.load())
    required = _required()
    try:
        data = read_bounded(file, limit=1 << 20, follow_symlinks=True)
        parse_object(data, f"the trust policy {file}")
        policy = Policy.model_validate_json(data)
    except NotFound:
        if file.is_symlink() or (os.environ.get("KVHUB_TRUST") and not absent):
            raise BadInput(f"the trust policy {file} does not exist", _MEND) from None
        policy = Policy()
    except Corrupt as error:
        raise BadInput(error.message, _MEND) from None
    except ValidationError as error:
        raise BadInput(f"the trust policy {file}: {first_fault(error)}", _MEND) from None
    return policy.model_copy(update={"require_signature": True}) if required else policy


def _required() -> bool:
    said = os.environ.get("KVHUB_REQUIRE_SIGNATURE", "")
    if said.lower() in ("1", "true", "yes", "on"):
        return True
    if said.lower() in ("", "0", "false", "no", "off"):
        return False
    raise BadInput(f"KVHUB_REQUIRE_SIGNATURE is {shown(said, 40)!r}", "1 demands signatures, 0 does not")


def save(policy: Policy, settings: Settings) -> None:
    """Write the policy, whole or not at all."""
    file = path(settings)
    with writing(file, "set KVHUB_TRUST"):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(policy.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    write_bytes(file, text.encode())


def provenance(directory: Path, manifest: Manifest, policy: Policy) -> Provenance:
    """Who signed an artifact. Errors: `Corrupt` for a signature that is malformed, foreign or wrong."""
    found = signatures.read_signature(directory, manifest)
    if found is None:
        return Provenance("unsigned")
    if not signatures.available() and not policy.require_signature:
        return Provenance("unchecked", found.public_key)
    signatures.check(found)
    name = policy.publisher(found.public_key)
    return Provenance("trusted" if name else "unknown", found.public_key, name)


def demand(directory: Path, manifest: Manifest, settings: Settings | None = None) -> Provenance:
    """As `provenance`, refusing what the policy does not allow: `Incompatible(code="signature")`."""
    policy = load(settings)
    found = provenance(directory, manifest, policy)
    if policy.require_signature and found.status != "trusted":
        raise Incompatible(
            f"mapper {manifest.digest[:12]} is {found}, and this machine requires a known publisher",
            "kvhub trust NAME KEY allows one",
            code="signature",
        )
    return found


def demand_namespace(repo_id: str, settings: Settings | None = None) -> None:
    """Refuse (`Incompatible(code="publisher")`) an organisation that the policy does not list."""
    allowed = load(settings).namespaces
    if allowed is not None and repo_id.partition("/")[0] not in allowed:
        raise Incompatible(
            f"{repo_id} is not of an organisation that this machine takes mappers from",
            "namespaces in trust.json lists them",
            code="publisher",
        )
