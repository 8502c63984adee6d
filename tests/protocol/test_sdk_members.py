"""The installed SDK is the one that `decathlon_mcp/protocol/sdk.py` was checked with, member by member."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp.server.session import ServerSession
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

import decathlon_mcp
from tests.protocol.sdk_members import FINGERPRINTS, MEMBERS, changed, normalized, table

SERVER = Path(decathlon_mcp.__file__).parent
PRIVATE_NAMES = re.compile(
    r"\b(_admit_session|_discard_session|_server_instances|_request_outbound|_read_stream_writer|is_json_response_enabled"
    r"|session\._connection)\b"
)


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_member_of_the_sdk_that_we_depend_on_has_changed() -> None:
    changes = changed(MEMBERS, FINGERPRINTS)
    assert not changes, "\n".join(
        [
            "the installed mcp differs from the version that decathlon_mcp/protocol/sdk.py was checked with:",
            *changes,
            "tests/protocol/sdk_members.py describes how to upgrade",
        ]
    )


def test_every_member_has_a_fingerprint() -> None:
    assert FINGERPRINTS.keys() == {member.name for member in MEMBERS}


def test_a_change_of_behaviour_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def _admit_session(self: object, requestor: object) -> None:
        return None

    monkeypatch.setattr(StreamableHTTPSessionManager, "_admit_session", _admit_session)
    (change,) = changed(MEMBERS, FINGERPRINTS)
    assert change.startswith(
        "mcp.server.streamable_http_manager.StreamableHTTPSessionManager._admit_session changed: "
    )


def test_a_change_of_a_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_standalone_sse_stream(self: object, reason: str) -> None:
        pass

    monkeypatch.setattr(
        StreamableHTTPServerTransport, "close_standalone_sse_stream", close_standalone_sse_stream
    )
    (change,) = changed(MEMBERS, FINGERPRINTS)
    assert "StreamableHTTPServerTransport.close_standalone_sse_stream changed: " in change


def test_a_member_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StreamableHTTPSessionManager, "_discard_session")
    (change,) = changed(MEMBERS, FINGERPRINTS)
    assert "StreamableHTTPSessionManager._discard_session is missing: " in change
    with pytest.raises(LookupError, match="_discard_session is missing"):
        table(MEMBERS)


def test_several_changes_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def __init__(self: object) -> None:  # noqa: N807
        pass

    monkeypatch.setattr(ServerSession, "__init__", __init__)
    monkeypatch.delattr(StreamableHTTPServerTransport, "_message_metadata")
    assert len(changed(MEMBERS, FINGERPRINTS)) == 2


def test_comments_docstrings_and_layout_are_not_changes() -> None:
    source = "def f(a):\n    return a + 1\n"
    same = '    def f(a):\n        """Add."""\n\n        # Adds one.\n        return a+1  # one\n'
    assert normalized(source) == normalized(same) == "deff(a):returna+1"
    assert normalized('x = "# no comment"\n') == 'x="#nocomment"'


def test_the_printed_table_is_the_one_in_force() -> None:
    assert table(MEMBERS) in (Path(__file__).with_name("sdk_members.py")).read_text("utf-8")


def test_only_the_sdk_module_uses_private_members_of_the_sdk() -> None:
    for file in SERVER.rglob("*.py"):
        if file == SERVER / "protocol" / "sdk.py":
            continue
        private = [
            name
            for name in imported_modules(file)
            if re.match(r"(mcp|mcp_types)\.", name) and re.search(r"\._[a-z]", name)
        ]
        assert not private, f"{file} imports {private}"
        used = PRIVATE_NAMES.findall(file.read_text("utf-8"))
        assert not used, f"{file} uses {used}"
