"""What a sandbox without an engine occupies on this machine, and how the next server finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.local.first_process import FirstProcess
from decathlon_mcp.sandboxes.local.process_table import ProcessId, ProcessTree
from decathlon_mcp.sandboxes.local.removal import remove_folder

OWNER_FILE = "owner"
"""In a sandbox's folder: the owner of the provider that opened it."""
LEADER_FILE = "leader"
"""In a sandbox's folder: which process is the first one, as `<pid> <started_ticks> <boot id>`."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# The driver's environment, which has its sandbox's marker, can be read by root alone. Another server that
# removes what a dead one left must find a driver that is stopped, and so did not end with its server.


class ProcessResources:
    """What one sandbox occupies on the machine: processes and a folder, any of which may be missing.

    `label`: stands for the owner in the marker of its processes, see `ProcessProvider.label`.
    """

    SUBFOLDERS: tuple[str, ...] = ()
    """Created in the sandbox's folder."""

    def __init__(self, owner: str, name: str, folder: Path, *, label: str) -> None:
        self.owner = owner
        self.label = label
        self.name = name
        self.folder = folder
        self.process: FirstProcess | None = None
        self.killed: bool | None = None
        """Whether the processes could be killed; None before it was tried."""

    @property
    def marker(self) -> str:
        """Value of `wire.SANDBOX_VARIABLE` in the environment of its processes."""
        return f"{self.label}/{self.name}"

    @property
    def leader(self) -> ProcessId | None:
        """The first process; None if it is not known."""
        return read_process(self.folder / LEADER_FILE) if self.process is None else self.process.id

    @property
    def process_tree(self) -> ProcessTree:
        return ProcessTree(self.label, self.name, self.leader)

    def create_folders(self) -> None:
        """Create the folder with its contents. Raises BadRequestError if there is already one."""
        # Complete when it gets its name: of a server that is killed meanwhile, the owner of every folder is
        # known.
        new = self.folder.with_name(unfinished_folder_prefix(self.owner) + self.name)
        new.mkdir(parents=True)
        (new / OWNER_FILE).write_text(self.owner, "utf-8")
        for name in self.SUBFOLDERS:
            (new / name).mkdir()
        try:
            new.rename(self.folder)
        except OSError:
            shutil.rmtree(new)
            raise BadRequestError(f"there is already a sandbox named {self.name}") from None

    def take_back(self) -> ProcessId:
        """Continue what a server with this owner has left; returns its first process.

        Raises SandboxLostError if that has ended.
        """
        leader = read_process(self.folder / LEADER_FILE)
        if leader is None:
            raise SandboxLostError(f"nothing is left of the sandbox {self.name}")
        self.process = FirstProcess.take_back(leader, self.folder)
        return leader

    def release(self) -> bool:
        """Remove what is neither a process nor in the folder; whether it is gone. Blocks."""
        return True

    def delete(self) -> bool:
        """Reap the first process, release the rest and delete the folder, after the processes were killed.

        Returns whether all is gone. Raises OSError. Blocks.
        """
        try:
            if self.process is not None:
                self.process.reap()
        finally:
            gone = self.release()
            if gone:
                # If some file cannot be deleted now, a later sweep finds the folder by the owner's.
                remove_folder(self.folder, last=OWNER_FILE)
        return gone


def unfinished_folder_prefix(owner: str) -> str:
    """How names of folders begin that a server with this owner has not finished creating."""
    return f".{owner}."


def read_owner(folder: Path) -> str | None:
    """Owner of the sandbox in a folder; None if there is no sandbox."""
    # Another server that uses this folder may remove its sandbox meanwhile, and what runs in a sandbox
    # without isolation can replace the file.
    try:
        return (folder / OWNER_FILE).read_text("utf-8", "replace")
    except OSError:
        return None


def write_process(file: Path, process: ProcessId) -> None:
    """Note a process for the next server."""
    boot_id = _BOOT_ID.read_text("utf-8").strip()
    file.write_text(f"{process.pid} {process.started_ticks} {boot_id}", "utf-8")


def read_process(file: Path) -> ProcessId | None:
    """The process that another server noted; None if the file is missing or of an earlier boot."""
    try:
        pid, started_ticks, boot_id = file.read_text("utf-8").split()
        process = ProcessId(int(pid), int(started_ticks))
        return process if boot_id == _BOOT_ID.read_text("utf-8").strip() else None
    except (OSError, ValueError):
        return None
