"""The server's key file: created once, private to its owner, and never overwritten."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.keys import load_or_create_key


def public_bytes(state: Path) -> bytes:
    return load_or_create_key(state).public_key().public_bytes_raw()


def test_key_is_created_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert public_bytes(state) == public_bytes(state)
    file = state / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == ["key"]


def test_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_or_create_key(tmp_path)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        load_or_create_key(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"]
)
def test_file_that_is_no_key_is_an_error_and_stays(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(SettingsError, match="is not an Ed25519 key"):
        load_or_create_key(tmp_path)
    assert file.read_bytes() == content
