"""Signatures of verdicts: Ed25519 (RFC 8032) over canonical JSON (RFC 8785).

The signature covers the verdict without its member `signature`. The verdict and the public key are enough to
verify it, however the verdict was parsed, stored and written in between: canonical JSON sorts the keys, has
no white space, and writes 1.0 and 1 the same.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from decathlon_mcp.grading.verdict import ALGORITHM, Signature, Verdict
from decathlon_mcp.storage.keys import load_or_create_key
from decathlon_mcp.types import JsonObject


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key; `raw` is its 32 bytes."""

    raw: bytes

    @cached_property
    def id(self) -> str:
        """The id that verdicts refer to: the first 16 hexadecimal digits of the key's SHA-256."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def to_json(self) -> JsonObject:
        """The form in which a server publishes its key."""
        return {"algorithm": ALGORITHM, "id": self.id, "key": b64encode(self.raw).decode()}


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
        value = b64encode(self._key.sign(signed_bytes(verdict.to_json()))).decode()
        return verdict.model_copy(
            update={"signature": Signature(algorithm=ALGORITHM, key=self.public.id, value=value)}
        )


def verdict_digest(verdict: JsonObject) -> str:
    """Identifies a verdict with its signature: `sha256:` and 64 hexadecimal digits over its canonical JSON.

    Raises ValueError if it has no such form.
    """
    return f"sha256:{hashlib.sha256(rfc8785.dumps(verdict)).hexdigest()}"


def signed_bytes(verdict: JsonObject) -> bytes:
    """What the signature of a verdict covers."""
    return rfc8785.dumps({name: value for name, value in verdict.items() if name != "signature"})
