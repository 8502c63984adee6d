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

from decathlon_mcp.archives.reading import ArchiveReader, Kind, Member

_CACHE = "__pycache__"


def evaluator_digest(archive: Path, *, folder: PurePosixPath, names: Collection[str]) -> str:
    """`sha256:` and 64 digits. `archive` has the task's files below `folder`; `names` count of them."""
    lines: list[bytes] = []
    with archive.open("rb") as file:
        reader = ArchiveReader.of_file(file)
        for member in reader:
            path = PurePosixPath(member.name)
            if not path.is_relative_to(folder) or member.kind is Kind.FOLDER:
                continue
            path = path.relative_to(folder)
            if path.parts and path.parts[0] in names and _CACHE not in path.parts:
                lines.append(_line(reader, member, path))
    return f"sha256:{hashlib.sha256(b''.join(sorted(lines))).hexdigest()}"


def _line(reader: ArchiveReader, member: Member, path: PurePosixPath) -> bytes:
    if member.kind in (Kind.SYMLINK, Kind.HARD_LINK):
        kind, content = b"link", member.link.encode("utf-8", "surrogateescape")
    else:
        kind, content = b"file", _content_digest(reader).encode()
    return b"\0".join((kind, str(path).encode("utf-8", "surrogateescape"), content)) + b"\n"


def _content_digest(reader: ArchiveReader) -> str:
    content = hashlib.sha256()
    for chunk in reader.body():
        content.update(chunk)
    return content.hexdigest()
