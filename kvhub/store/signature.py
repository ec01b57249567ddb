"""`signature.json` beside a manifest: who vouches for it (ed25519, by the `cryptography` package).

What is signed is the mapper's digest, the sha256 of the manifest's bytes, which lists the sha256 of
every file: one signature covers all of them. Evidence is not signed; our gate judges it anew.
Sigstore would need its transparency log at hand, which an air-gapped team has not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvhub.artifact.beside import read_beside, write_beside
from kvhub.artifact.layout import SIGNATURE
from kvhub.artifact.manifest import Manifest
from kvhub.errors import BadInput, Corrupt, KvhubError
from kvhub.files import unwritable, writing
from kvhub.model.identity import Record, Sha256, canonical_json
from kvhub.strict_json import read_bounded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE_LIMIT = 64 << 10
KEY_LIMIT = 16 << 10
_CONTEXT = b"kvhub mapper signature v1\n"


class Signature(Record):
    """The file. `public_key` is the raw ed25519 key, 32 bytes in hex; whose it is, the reader must know."""

    schema_version: Literal[1] = 1
    algorithm: Literal["ed25519"] = "ed25519"
    mapper: Sha256
    public_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    def to_bytes(self) -> bytes:
        """The bytes of `signature.json`."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"


def available() -> bool:
    """Whether signatures can be made and checked here."""
    from importlib.util import find_spec

    return find_spec("cryptography") is not None


def new_key(path: Path) -> str:
    """Write a new private key (PEM, mode 0600) where nothing is; returns the public key in hex."""
    _demand()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadInput(f"{path} exists already", "a key is never overwritten") from None
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path.parent} is not a directory", "make it, or choose another place") from None
    except OSError as error:
        raise unwritable(path, error, "choose another place") from None
    try:
        with writing(path), open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)  # half a key is none, and would stand in the way of the next try
        raise
    return _public(key)


def sign(directory: Path, manifest: Manifest, key: Path) -> Signature:
    """Sign a mapper with the private key in a PEM file, and put the signature beside its manifest."""
    _demand()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(read_bounded(key, limit=KEY_LIMIT), password=None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{key} is not a private key without a password", "kvhub sign --new-key") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise BadInput(f"{key} is not an ed25519 key", "kvhub sign --new-key")
    made = Signature(
        mapper=manifest.digest,
        public_key=_public(private),
        signature=private.sign(_message(manifest.digest)).hex(),
    )
    write_beside(directory, SIGNATURE, made.to_bytes())
    return made


def read_signature(directory: Path, manifest: Manifest) -> Signature | None:
    """The signature beside a manifest, well formed and of this mapper; not checked yet.

    Errors: those of `read_beside`.
    """
    return read_beside(
        directory, SIGNATURE, manifest, Signature, limit=SIGNATURE_LIMIT, what="the signature was"
    )


def check(signature: Signature) -> None:
    """Refuse (`Corrupt`) what the key did not sign. Errors: `KvhubError` without the library."""
    _demand()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
        key.verify(bytes.fromhex(signature.signature), _message(signature.mapper))
    except (InvalidSignature, ValueError):
        raise Corrupt(f"{SIGNATURE} is no valid signature of mapper {signature.mapper[:12]}") from None


def _message(digest: str) -> bytes:
    return _CONTEXT + digest.encode()


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _demand() -> None:
    if not available():
        raise KvhubError("signatures need the cryptography package", 'pip install "kvhub[sign]"')
