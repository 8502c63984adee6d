"""Snapshots of gVisor: the files that runsc writes, and a description by which they are checked.

runsc finds most damage only after it has begun to restore, and changed memory not at all. It restores what
was saved with the same version, options and configuration only, and says little about the reason.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from decathlon_mcp.errors import SnapshotError
from decathlon_mcp.plugins.gvisor.command import OPTIONS, bundle_config
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.sandboxes.host.image_folder import ImageFolder
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.types import JsonObject, as_object

DESCRIPTION_FILE = "description.json"
SAVE_OPTIONS = ("--leave-running", "--compression=none")
"""To compress costs five times the time, for files of four fifths to a quarter of the size."""
IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
"""What runsc writes with these options."""
_DESCRIPTION_BYTES = 64 << 10


def describe(folder: Path, spec: SandboxSpec, image: ImageFolder, version: str) -> None:
    """Write the description of what runsc has saved in a folder. Raises OSError. Blocks."""
    content = {**_kind(spec, image, version), "files": {name: _digest(folder / name) for name in IMAGE_FILES}}
    (folder / DESCRIPTION_FILE).write_text(json.dumps(content), "utf-8")


def move(saved: Path, target: Path) -> Snapshot:
    """Give a snapshot its place, where it appears as a whole. Raises OSError. Blocks."""
    try:
        saved.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = target.with_name(f".{target.name}")
        try:
            shutil.copytree(saved, copy)
            for path in (copy, *copy.iterdir()):
                os.chown(path, saved.stat().st_uid, saved.stat().st_gid)
            copy.rename(target)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
    return Snapshot(target)


def check(snapshot: Snapshot, spec: SandboxSpec, image: ImageFolder, version: str) -> None:
    """Raise SnapshotError unless a sandbox of this kind can be opened from a snapshot. Blocks."""
    folder = snapshot.folder
    try:
        with open_regular(folder / DESCRIPTION_FILE) as file:
            known = as_object(json.loads(file.read(_DESCRIPTION_BYTES))) or {}
        for name, value in _kind(spec, image, version).items():
            if known.get(name) != value:
                raise SnapshotError(_DIFFERENCES[name].format(known.get(name), value))
        if known.get("files") != {name: _digest(folder / name) for name in IMAGE_FILES}:
            raise SnapshotError("the snapshot is damaged: its files are not those that were written")
    except FileNotFoundError:
        raise SnapshotError("the snapshot is gone, or a part of it is") from None
    except (OSError, ValueError) as error:
        raise SnapshotError(f"the snapshot cannot be read: {error}") from None


def open_files(snapshot: Snapshot, stack: ExitStack) -> Sequence[tuple[str, int]]:
    """Name and descriptor of each of a snapshot's files, which `stack` closes. Raises SnapshotError."""
    files: list[tuple[str, int]] = []
    for name in IMAGE_FILES:
        try:
            file = stack.enter_context(open_regular(snapshot.folder / name))
        except OSError as error:
            raise SnapshotError(f"the snapshot cannot be read: {error.strerror}") from None
        files.append((name, file.fileno()))
    return files


_DIFFERENCES = {
    "runsc": "the snapshot was made by {}, and only that can open it; here is {}",
    "configuration": "the snapshot is of a sandbox with another image, root, command or limits",
}


def _kind(spec: SandboxSpec, image: ImageFolder, version: str) -> JsonObject:
    """What a snapshot and the sandbox that is opened from it must have in common."""
    files = image.digest or str(image.location)
    content = json.dumps([OPTIONS, files, bundle_config(spec, image)], sort_keys=True)
    return {"runsc": version, "configuration": hashlib.sha256(content.encode()).hexdigest()}


def _digest(file: Path) -> str:
    with open_regular(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
