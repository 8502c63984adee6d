"""The server's private key (Ed25519, RFC 8032): made once, kept in the state folder as `key`."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from decathlon_mcp.errors import SettingsError

KEY_FILE = "key"


def load_or_create_key(state: Path) -> Ed25519PrivateKey:
    """Return the private key of this state folder, creating it first if there is none.

    Raises SettingsError if the file cannot be read or written, is not an Ed25519 key, or is accessible to
    other users.
    """
    file = state / KEY_FILE
    if not file.exists():
        _create(file)
    return _load(file)


def _create(file: Path) -> None:
    partial = file.with_name(f".{KEY_FILE}.{secrets.token_hex(6)}")
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, pem)
            os.fsync(descriptor)
            # link(2) is atomic and never overwrites: a reader sees a complete key, and of two servers that
            # start at the same time the second uses the first one's key.
            with suppress(FileExistsError):
                file.hardlink_to(partial)
        finally:
            os.close(descriptor)
            partial.unlink()
    except OSError as error:
        raise SettingsError(f"--state: the key {file} cannot be created: {error.strerror}") from None


def _load(file: Path) -> Ed25519PrivateKey:
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
        raise SettingsError(f"{file} is not an Ed25519 key: remove it to have a new one created")
    return key
