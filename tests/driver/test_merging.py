"""`merge`: what the processes that the driver starts have afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from decathlon_sandbox import wire

from tests.driver.peer import DriverPeer

pytestmark = pytest.mark.anyio

FIXED_ADDRESSES = 0x40000


def variables(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/environ").read_text().split("\0"))


def has_fixed_addresses(pid: int) -> bool:
    return bool(int(Path(f"/proc/{pid}/personality").read_text(), 16) & FIXED_ADDRESSES)


def is_merged(pid: int, *, expected: bool) -> bool:
    """Whether pages are merged; the expected value on a kernel that does not say so."""
    try:
        stat = Path(f"/proc/{pid}/ksm_stat").read_text()
    except FileNotFoundError:
        return expected
    return "ksm_merge_any: yes" in stat if "ksm_merge_any" in stat else expected


async def test_servers_are_alike_after_merge_and_keep_their_own_settings(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("plain", "before"))
    (before,) = peer.living()
    allowed = await peer.request(wire.MERGE)
    assert allowed["fixed_addresses"]
    await peer.start(peer.scripted_server("plain", "after"))
    (after,) = {*peer.living()} - {before}
    assert (has_fixed_addresses(before), has_fixed_addresses(after)) == (False, True)
    assert "PYTHONHASHSEED=0" not in variables(before)
    assert "PYTHONHASHSEED=0" in variables(after)
    assert not is_merged(before, expected=False)
    assert is_merged(after, expected=allowed["merging"]) is allowed["merging"]
    await peer.start(peer.scripted_server("plain", "own", env={"PYTHONHASHSEED": "7"}))
    (own,) = {*peer.living()} - {before, after}
    assert "PYTHONHASHSEED=7" in variables(own)
