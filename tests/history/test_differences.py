"""Recorded calls, and what differs between two replies of one call: what kind of difference it is."""

from __future__ import annotations

from contextlib import closing
from hashlib import sha256
from pathlib import Path

from decathlon_mcp.plugins.history.repeated_calls import (
    MAX_CLASSIFIED_CHARACTERS,
    PART_CHARACTERS,
    Difference,
    Paths,
    ReplyText,
    changed_in,
    compare_replies,
    recorded_calls,
)
from decathlon_mcp.storage.trajectory import CallLines, Trajectory

LONG = "word " * (MAX_CLASSIFIED_CHARACTERS // 5)


def compare(old: str, new: str) -> Difference:
    difference = compare_replies(ReplyText(False, (old,)), ReplyText(False, (new,)))
    assert difference is not None
    return difference


def test_only_content_and_the_mark_of_an_error_are_compared() -> None:
    old = {"content": [{"type": "text", "text": "a"}], "_meta": {"took": 1}, "structuredContent": {"n": 1}}
    new = {"content": [{"text": "a", "type": "text"}], "isError": False}
    assert compare_replies(ReplyText.of_result(old), ReplyText.of_result(new)) is None
    failed = compare_replies(ReplyText.of_result(old), ReplyText.of_result({**old, "isError": True}))
    assert failed is not None
    assert failed.kind == "other"
    assert str(failed).startswith("an error now; ")
    image = {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    assert compare_replies(ReplyText.of_result(image), ReplyText.of_result(old)) is not None


DIFFERENCES = [
    ("at 2026-11-25T21:20:12.345Z", "at 2026-11-26T03:00:00Z", "time"),
    ("Wed Nov 25 21:20:12 2026 +0000", "Thu Nov 26 03:00:00 2026 +0000", "time"),
    ("modified: 1795642337.36, 12 bytes", "modified: 1795699999.1, 12 bytes", "time"),
    ("commit ebf672d now", "commit a5446d5 now", "identifier"),
    ('{"order_id": 17, "n": 3}', '{"order_id": 19, "n": 3}', "identifier"),
    ("<A1b2C3d4E5f6G7h8J9@host>", "<Z9y8X7w6V5u4T3s2R1@host>", "identifier"),
    ("12 rows", "13 rows", "other"),
    ("commit ebf672d, 3 files", "commit a5446d5, 4 files", "other"),
    ("1234567 EUR", "7654321 EUR", "other"),
    # As long ones are not read.
    (f"{LONG} 10:00", f"{LONG} 11:00", "other"),
]


def test_a_difference_has_its_class_and_whole_words_of_a_bounded_length() -> None:
    for old, new, kind in DIFFERENCES:
        assert compare(old, new).kind == kind, old
    assert compare("commit 1234567 now", "commit a5446d5 now").changed == {"1234567"}
    difference = compare("the total is 1204 EUR today", "the total is 1304 EUR today")
    assert (difference.old_part, difference.new_part) == ("1204", "1304")
    assert len(compare("", "x" * 10_000).new_part) == PART_CHARACTERS + 1


def test_a_sandboxs_path_is_read_as_the_others() -> None:
    paths = Paths.of("/s/a/root", "/s/b/root")
    old, new = ReplyText(False, ("wrote /s/a/root/x",)), ReplyText(False, ("wrote /s/b/root/x",))
    assert paths is not None
    assert compare_replies(old, new, paths) is None
    assert compare_replies(old, new) is not None
    assert paths.moved({"p": ["/s/a/root/x", 1]}) == {"p": ["/s/b/root/x", 1]}
    assert Paths.of("/r", "/r") is None


def test_arguments_with_an_identifier_that_has_changed_are_found() -> None:
    changed = {"ebf672d512ddd1e595ff2e909dc95038858ed631"}
    assert changed_in({"revision": "ebf672d"}, changed) == ["ebf672d"]
    assert changed_in({"range": ["ebf672d512ddd1e595ff2e909dc95038858ed631..HEAD"]}, changed) == [*changed]
    assert changed_in({"revision": "HEAD", "n": 3}, changed) == []
    assert changed_in({"id": 17}, {"17"}) == ["17"]


def test_calls_know_which_others_ran_meanwhile(tmp_path: Path) -> None:
    with closing(Trajectory(tmp_path / "one").create()) as trajectory:
        for event, seq in (
            *(("call", 1), ("reply", 1)),
            *(("call", 2), ("call", 3), ("reply", 3), ("reply", 2)),
            *(("call", 4), ("call", 5), ("reply", 5)),
        ):
            trajectory.add(event, seq=seq)
        found = list(trajectory.sent_calls())
        assert [call.seq for call in recorded_calls(trajectory) if call.overlaps] == [2, 3, 4]
        assert [call.seq for call in recorded_calls(trajectory, 2)] == [1, 2]
    assert found[3] == CallLines(4, found[3].call, b"", found[3].call_at, float("inf"))


def test_many_words_and_many_identifiers_take_little_time() -> None:
    changed = {sha256(b"%d" % number).hexdigest() for number in range(20_000)}
    longer, shorter = f"{min(changed)}0", max(changed)[:9]
    words = [sha256(b"word %d" % number).hexdigest()[:20] for number in range(20_000)]
    # Pair by pair, this takes minutes.
    assert changed_in({"command": " ".join([*words, longer, shorter])}, changed) == sorted([longer, shorter])
