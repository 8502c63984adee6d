"""An export appears at its place when it is whole, and replaces another only if that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.exports.export import new_file


def test_file_appears_whole_and_replaces_only_if_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    with new_file(out, force=False) as file:
        file.write(b"whole")
        assert not out.exists()
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"whole"
    assert out.stat().st_mode & 0o600 == 0o600
    with pytest.raises(BadRequestError, match="exists; --force"), new_file(out, force=False):
        pass
    with new_file(out, force=True) as file:
        file.write(b"new")
    assert out.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError), new_file(out, force=True) as file:
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"new"
