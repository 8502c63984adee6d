"""Which evaluator graded: a digest over the files that only grading needs, as they went into the sandbox.

It is the SHA-256 of one line for each file or link of the task's folder below the suite's `grading` names
(evaluation, groundtruth, rubric), sorted: its kind (`file`, `link`), a zero byte, its path, a zero byte, the
SHA-256 of its content (a link: its target), a line feed. Times, modes and caches of Python do not count. What
a preprocess wrote there does: a groundtruth made anew for each episode gives each its own digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from decathlon_mcp.archives import tar

_CACHE = "__pycache__"
_CHUNK_BYTES = 1 << 20


def evaluator_digest(archive: Path, *, folder: PurePosixPath, names: Collection[str]) -> str:
    """`sha256:` and 64 digits. `archive` has the task's files below `folder`; `names` count of them."""
    lines: list[bytes] = []
    with archive.open("rb") as file:
        for member in tar.read_members(file):
            path = PurePosixPath(member.name.decode("utf-8", "surrogateescape"))
            if not path.is_relative_to(folder) or member.kind == tar.FOLDER:
                continue
            path = path.relative_to(folder)
            if path.parts and path.parts[0] in names and _CACHE not in path.parts:
                lines.append(_line(file, member, path))
    return f"sha256:{hashlib.sha256(b''.join(sorted(lines))).hexdigest()}"


def _line(file: BinaryIO, member: tar.Member, path: PurePosixPath) -> bytes:
    if member.kind in (tar.SYMLINK, tar.HARD_LINK):
        kind, said = b"link", member.link
    else:
        kind, said = b"file", _content(file, member).encode()
    return b"\0".join((kind, str(path).encode("utf-8", "surrogateescape"), said)) + b"\n"


def _content(file: BinaryIO, member: tar.Member) -> str:
    total, left = hashlib.sha256(), member.size
    file.seek(member.offset)
    while left > 0:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            break
        total.update(chunk)
        left -= len(chunk)
    return total.hexdigest()
