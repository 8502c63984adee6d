"""Signatures of verdicts: Ed25519 (RFC 8032) over canonical JSON (RFC 8785).

The signature covers the verdict without its member `signature`. The verdict and the public key are enough to
verify it, however the verdict was parsed, stored and written in between: canonical JSON sorts the keys, has
no white space, and writes 1.0 and 1 the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import rfc8785
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.verdict import ALGORITHM, Signature, Verdict
from decathlon_mcp.storage.keys import load_or_create_key
from decathlon_mcp.types import JsonObject, as_object

_HEX = re.compile(r"[0-9a-fA-F]{64}")


class BadSignatureError(DecathlonError):
    """A verdict does not carry a valid signature of the key it is checked with."""

    code = "bad_signature"


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key; `raw` is its 32 bytes."""

    raw: bytes

    @cached_property
    def id(self) -> str:
        """The id that verdicts refer to: the first 16 hexadecimal digits of the key's SHA-256."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @classmethod
    def read(cls, encoded: bytes) -> Self:
        """Parse a public key: the JSON that a server publishes, base64, 64 hexadecimal digits, or PEM.

        Raises ValueError for anything else.
        """
        text = encoded.decode("utf-8", "replace").strip()
        try:
            if text.startswith("{"):
                text = str((as_object(json.loads(text)) or {}).get("key"))
            raw = _from_pem(encoded) if text.startswith("-----") else _from_text(text)
        except (ValueError, RecursionError, UnsupportedAlgorithm):
            raw = b""
        if len(raw) != 32:
            raise ValueError("not an Ed25519 public key")
        return cls(raw)

    def to_json(self) -> JsonObject:
        """The form in which a server publishes its key."""
        return {"algorithm": ALGORITHM, "id": self.id, "key": b64encode(self.raw).decode()}

    def check(self, verdict: JsonObject) -> None:
        """Verify a signed verdict. Raises BadSignatureError if it is not exactly what this key signed."""
        signature = as_object(verdict.get("signature"))
        if signature is None:
            raise BadSignatureError("it is not signed")
        if signature.get("algorithm") != ALGORITHM:
            raise BadSignatureError(f"it is not signed with {ALGORITHM}")
        # The signature does not cover its own member: whatever else is in there, anybody can have added.
        if extra := sorted(signature.keys() - Signature.model_fields.keys()):
            raise BadSignatureError(f"its signature has unsigned members: {', '.join(extra)[:200]}")
        if signature.get("key") != self.id:
            raise BadSignatureError(f"it is signed with another key, {signature.get('key')}, not {self.id}")
        try:
            value = _from_base64(signature.get("value"))
            Ed25519PublicKey.from_public_bytes(self.raw).verify(value, _signed_bytes(verdict))
        # Whatever has no canonical form was not signed by anybody. `rfc8785` raises subclasses of ValueError
        # (for NaN, integers outside ±(2**53 - 1), lone surrogates, keys that are no strings) and recurses
        # once a level, so that deep nesting is a RecursionError.
        except (ValueError, RecursionError, InvalidSignature):
            raise BadSignatureError(
                "its signature does not match: the verdict was changed, or the signature is forged"
            ) from None


class Signer:
    """Signs verdicts with the server's private key. Usually created with `at`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    @classmethod
    def at(cls, state: Path) -> Self:
        """A signer with the key of this state folder, created if there is none. Raises SettingsError."""
        return cls(load_or_create_key(state))

    def sign(self, verdict: Verdict) -> Verdict:
        """Return the verdict with a signature; an earlier signature is replaced."""
        value = b64encode(self._key.sign(_signed_bytes(verdict.to_json()))).decode()
        return verdict.model_copy(
            update={"signature": Signature(algorithm=ALGORITHM, key=self.public.id, value=value)}
        )


def verdict_digest(verdict: JsonObject) -> str:
    """Identifies a verdict with its signature: see `Regrading`. Raises ValueError if it has no such form."""
    return f"sha256:{hashlib.sha256(rfc8785.dumps(verdict)).hexdigest()}"


def _signed_bytes(verdict: JsonObject) -> bytes:
    return rfc8785.dumps({name: value for name, value in verdict.items() if name != "signature"})


def _from_base64(text: object) -> bytes:
    """Decode base64. Raises ValueError for a text other than the canonical encoding of the bytes."""
    # Decoders ignore the last bits of a text, so that one signature would have several.
    value = b64decode(str(text), validate=True)
    if b64encode(value).decode() != text:
        raise ValueError("not canonical base64")
    return value


def _from_pem(pem: bytes) -> bytes:
    key = load_pem_public_key(pem)
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b""


def _from_text(text: str) -> bytes:
    return bytes.fromhex(text) if _HEX.fullmatch(text) else b64decode(text, validate=True)
