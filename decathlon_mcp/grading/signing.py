"""Who a verdict is from: the server's key (Ed25519, RFC 8032), made once and kept in `<state>/key`.

What is signed is the canonical form (`canonical.py`) of the verdict as it is told, but for its member
`signature`; so the object alone, wherever it was kept meanwhile, and the public key are all one needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from decathlon_mcp.errors import DecathlonError, SettingsError
from decathlon_mcp.grading.canonical import canonical
from decathlon_mcp.grading.verdict import ALGORITHM, Signature, Verdict
from decathlon_mcp.types import JsonObject, as_object

FILE = "key"
_HEX = re.compile(r"[0-9a-fA-F]{64}")


class BadSignatureError(DecathlonError):
    """A verdict is not what the holder of a key signed; the message says what is wrong."""

    code = "bad_signature"


@dataclass(frozen=True)
class PublicKey:
    """The half that everybody may know: 32 bytes."""

    raw: bytes

    @cached_property
    def id(self) -> str:
        """By which verdicts name it: the first 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @classmethod
    def read(cls, said: bytes) -> Self:
        """From what a server tells of its key (JSON), from base64, hexadecimal digits or PEM.

        Raises ValueError for anything else.
        """
        text = said.decode("utf-8", "replace").strip()
        try:
            if text.startswith("{"):
                text = str((as_object(json.loads(text)) or {}).get("key"))
            raw = _from_pem(said) if text.startswith("-----") else _from_text(text)
        except (ValueError, RecursionError, UnsupportedAlgorithm):
            raw = b""
        if len(raw) != 32:
            raise ValueError("not an Ed25519 public key")
        return cls(raw)

    def to_json(self) -> JsonObject:
        """As the server tells it."""
        return {"algorithm": ALGORITHM, "id": self.id, "key": b64encode(self.raw).decode()}

    def check(self, told: JsonObject) -> None:
        """Raises BadSignatureError unless this verdict is exactly what the key's holder signed."""
        signature = as_object(told.get("signature"))
        if signature is None:
            raise BadSignatureError("it is not signed")
        if signature.get("algorithm") != ALGORITHM:
            raise BadSignatureError(f"it is not signed with {ALGORITHM}")
        if signature.get("key") != self.id:
            raise BadSignatureError(f"it is signed with another key, {signature.get('key')}, not {self.id}")
        try:
            signed = canonical({name: value for name, value in told.items() if name != "signature"})
            value = b64decode(str(signature.get("value")), validate=True)
            Ed25519PublicKey.from_public_bytes(self.raw).verify(value, signed)
        except (ValueError, RecursionError, InvalidSignature):
            raise BadSignatureError("its signature does not fit: it was changed, or forged") from None


class Signer:
    """Holds the server's key. Made by `at`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    @classmethod
    def at(cls, state: Path) -> Self:
        """The key of this state folder, made where there is none, readable by its owner alone.

        Raises SettingsError where it is no such key, or others can read it.
        """
        file = state / FILE
        if not file.exists():
            _make(file)
        return cls(_read(file))

    def sign(self, verdict: Verdict) -> Verdict:
        """The same with a signature over all of it."""
        unsigned = verdict.model_copy(update={"signature": None})
        value = b64encode(self._key.sign(canonical(unsigned.to_json()))).decode()
        return unsigned.model_copy(
            update={"signature": Signature(algorithm=ALGORITHM, key=self.public.id, value=value)}
        )


def _make(file: Path) -> None:
    """Whole or not at all; where two servers start at once, one key is made."""
    partial = file.with_name(f".{FILE}.{secrets.token_hex(6)}")
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, pem)
            os.fsync(descriptor)
            with suppress(FileExistsError):
                file.hardlink_to(partial)
        finally:
            os.close(descriptor)
            partial.unlink()
    except OSError as error:
        raise SettingsError(f"--state: the key {file} cannot be made: {error.strerror}") from None


def _read(file: Path) -> Ed25519PrivateKey:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            key = load_pem_private_key(opened.read(), password=None)
    except OSError as error:
        raise SettingsError(f"--state: the key {file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    else:
        if mode & 0o077:
            raise SettingsError(f"the key {file} can be read by others: chmod 600 {file}")
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"{file} is not an Ed25519 key: remove it, and another will be made")
    return key


def _from_pem(pem: bytes) -> bytes:
    key = load_pem_public_key(pem)
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b""


def _from_text(text: str) -> bytes:
    return bytes.fromhex(text) if _HEX.fullmatch(text) else b64decode(text, validate=True)
