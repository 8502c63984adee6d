"""Creation of the state folder, which several servers can share."""

from __future__ import annotations

from pathlib import Path

from decathlon_mcp.errors import SettingsError

SUBFOLDERS = ("episodes", "scratch")


def create_state_folder(state: Path) -> None:
    """Create the folder and its subfolders, accessible to their owner alone.

    Raises SettingsError if that is not possible, e.g. on a read-only file system.
    """
    # The names of folders in `episodes` are handles, which are capabilities: only the owner may list them.
    for folder in (state, *(state / name for name in SUBFOLDERS)):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise SettingsError(
                f"--state: {folder} cannot be used: {error.strerror}; choose another folder"
            ) from None
