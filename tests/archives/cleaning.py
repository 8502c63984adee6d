"""A cleaned workspace as a file."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.workspace import CleanWorkspace
from decathlon_mcp.archives.writing import archive_chunks, save


def clean_workspace(
    archive: Path,
    into: Path,
    *,
    prefix: str,
    limit_bytes: int,
    limit_members: int,
    root: PurePosixPath | None = None,
) -> list[str]:
    """Write the cleaned `archive` to `into`; returns what was refused or changed."""
    top = root or PurePosixPath("/")
    workspace = CleanWorkspace(archive, prefix, limit_bytes, limit_members, top)
    save(archive_chunks(workspace.streamed().entries()), into)
    return workspace.refused


def extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Extract what a test has packed below a folder, as tar does, with any Python from 3.11."""
    # Debian 12's Python 3.11.2 has no filters; newer ones warn where none is named.
    tar.extraction_filter = getattr(tarfile, "tar_filter", None)
    tar.extractall(folder)
