"""Which release of Toolathlon a checkout has: from before Toolathlon-Verified, or from then on.

Toolathlon-Verified is upstream's repaired release of the same 108 tasks (2026-06-30,
https://toolathlon.xyz/docs/blog/toolathlon-verified). It changed 83 of them, so that rewards of one release
say little about the other.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from decathlon_mcp.suites.checkout import git_output
from decathlon_mcp.suites.suite import Release

BEFORE = Release("before", "before Toolathlon-Verified")
VERIFIED = Release("verified", "Toolathlon-Verified or later")
UNKNOWN = Release("unknown", "unknown whether before or after Toolathlon-Verified")
VERIFIED_COMMIT = "d57361c0f1582cf9a0675c0753315bb6b004bd0e"
ROOT_COMMIT = "be334ecace50427432d4f53a097c837256ab1e28"
"""The first commit of upstream's history: a history that contains it has not been shortened."""
VERIFIED_TEXTS = "2afe3883779e05b30b900d0c355d05e0abd3f856ce7608434d8f410112e2c41c"
TEXTS_BEFORE = frozenset(
    {
        "798c477d7fb05740833c15a6ef3ffc8d37a0a46df6cb91b2ec236131e169151c",  # 500e3d86, 2025-10-28
        "8c69dc6d6f3314c96a0cc8be759f5643aef1d983665aa9fb18c86ebe13517472",  # fae857db, 2025-11-04
    }
)
TASKS = "tasks/finalpool"


def find_release(checkout: Path) -> Release:
    """The release of a checkout of Toolathlon: by its history, else by the texts of its tasks.

    Blocks: runs git. A fork with tasks of its own, whose history does not go back to upstream's, is
    UNKNOWN.
    """
    history = _history(checkout)
    if VERIFIED_COMMIT in history:
        return VERIFIED
    texts = texts_digest(checkout)
    # Before the history: a fork may have upstream's changes without its commits.
    if texts == VERIFIED_TEXTS:
        return VERIFIED
    return BEFORE if ROOT_COMMIT in history or texts in TEXTS_BEFORE else UNKNOWN


def texts_digest(checkout: Path) -> str:
    """A digest of the task texts in English, by task."""
    total = hashlib.sha256()
    for file in sorted((checkout / TASKS).glob("*/docs/task.md")):
        total.update(f"{file.parent.parent.name}\0".encode())
        try:
            total.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            continue  # reported where the task is read
    return total.hexdigest()


def _history(checkout: Path) -> frozenset[str]:
    """The commits that the checkout's commit is made of; empty without git."""
    if not (checkout / ".git").exists():
        return frozenset()
    return frozenset((git_output(checkout, "rev-list", "HEAD") or "").split())
