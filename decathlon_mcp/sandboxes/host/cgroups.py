"""Limits on the memory, CPU time and number of processes of a sandbox, by control groups of its own.

Each controller is used where the kernel has it: in a hierarchy of version 1, or in the hierarchy of version
2. The groups of sandboxes are created in the server's own group. In version 2 a group with processes passes
no controller on, so there they are created in the nearest group above which does and in which the server may
create some: as root, below its service; as a user of systemd, in the user manager's slice, if the server was
started by `systemd-run --user --scope`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from decathlon_mcp.sandboxes.base import LimitName, Limits
from decathlon_mcp.sandboxes.capabilities import FULL, Usage
from decathlon_mcp.storage.disk import read_kernel_file

CONTROLLERS: Final[Mapping[LimitName, str]] = {"memory": "memory", "cpus": "cpu", "pids": "pids"}
REMOVE_SECONDS = 5.0
"""How long the kernel may take to release a group whose processes were killed."""
_CPU_PERIOD_MICROSECONDS = 100_000
_PROCESSES = "cgroup.procs"


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: where it is mounted, the group that is its top there, and its controllers."""

    path: Path
    top: str
    version: int
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """What this server can limit, and the folder of the group in which it creates groups for that."""

    by_limit: Mapping[LimitName, Path]

    @classmethod
    def of_this_process(cls, process: Path = Path("/proc/self")) -> Self:
        """Look for groups in which this process may create others. Creates and removes a group in each."""
        try:
            groups = list(_own_groups(read_kernel_file(process / "cgroup")))
            mounts = list(_mounts(read_kernel_file(process / "mountinfo")))
        except OSError:
            return cls({})
        found: dict[LimitName, Path] = {}
        # A process is in one group of version 2, so that all its controllers must be there.
        unified: Path | None = None
        for limit, controller in CONTROLLERS.items():
            for mount in mounts:
                own = next((path for names, path in groups if _is_of(mount, names, controller)), None)
                if own is None:
                    continue
                if mount.version == 2 and unified is not None:
                    parent = unified if _passes_on(unified, controller) else None
                else:
                    parent = _parent(mount, own, controller)
                if parent is not None:
                    found[limit] = parent
                    unified = parent if mount.version == 2 else unified
                    break
        return cls(found)

    @property
    def unlimited(self) -> tuple[LimitName, ...]:
        """Limits that cannot be enforced by groups."""
        return tuple(limit for limit in CONTROLLERS if limit not in self.by_limit)

    def group(self, name: str) -> Group:
        """The group of a sandbox, which may not exist."""
        return Group({parent / name for parent in self.by_limit.values()})


def is_group(folder: Path, name: str, process: Path = Path("/proc/self")) -> bool:
    """Whether a path belongs to a control group with this name, which may not exist any more."""
    if folder.name != name or ".." in folder.parts:
        return False
    try:
        mounts = list(_mounts(read_kernel_file(process / "mountinfo")))
    except OSError:
        return False
    return any(folder.is_relative_to(mount.path) for mount in mounts)


class Group:
    """The control group of one sandbox: a folder in each hierarchy that is used."""

    def __init__(self, folders: set[Path]) -> None:
        self.folders: Sequence[Path] = sorted(folders)

    def create(self, limits: Limits) -> None:
        """Create it with these limits, as far as its hierarchies have them. Raises OSError."""
        for folder in self.folders:
            folder.mkdir()
            for name, value in _values(limits):
                file = folder / name
                if file.exists():
                    # Not `write_text`: it would create a file.
                    _write(file, value)

    @property
    def process_files(self) -> Sequence[Path]:
        """Files to which a process writes 0 to join."""
        return [folder / _PROCESSES for folder in self.folders]

    def dismiss(self, pid: int) -> None:
        """Move a process to the groups that contain these, as far as the kernel allows it."""
        for folder in self.folders:
            with suppress(OSError):
                _write(folder.parent / _PROCESSES, str(pid))

    @property
    def was_out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory, once it was at its own limit.

        Where the whole machine lacks memory, the kernel kills processes of groups that are below theirs.
        """
        for folder in self.folders:
            events = _numbers(folder / "memory.events") or _numbers(folder / "memory.oom_control")
            if not events.get("oom_kill"):
                continue
            # Version 1 has a count of failures too, which Linux 6.18 leaves at 0.
            most = _part(folder / "memory.max_usage_in_bytes", folder / "memory.limit_in_bytes")
            if events.get("max") or (most is not None and most >= FULL):
                return True
        return False

    def usage(self) -> Usage:
        """The parts of its memory and of its number of processes that it uses now."""
        memory = pids = None
        for folder in self.folders:
            memory = memory or _part(folder / "memory.current", folder / "memory.max")
            memory = memory or _part(folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes")
            pids = pids or _part(folder / "pids.current", folder / "pids.max")
        return Usage(memory, pids)

    def remove(self) -> bool:
        """Remove it, once its processes were killed; whether it is gone. Blocks."""
        deadline = time.monotonic() + REMOVE_SECONDS
        remaining = list(self.folders)
        while remaining:
            remaining = [folder for folder in remaining if not _removed(folder)]
            if remaining:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)  # nothing reports it
        return True


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number; none of a file that is not there."""
    try:
        lines = [line.split() for line in read_kernel_file(file).splitlines()]
        return {line[0]: int(line[1]) for line in lines}
    except (OSError, ValueError, IndexError):
        return {}


def _number(file: Path) -> int | None:
    """The number in a file; None for "max" and for a file that is not there."""
    try:
        return int(read_kernel_file(file))
    except (OSError, ValueError):
        return None


def _part(used: Path, limit: Path) -> float | None:
    total, current = _number(limit), _number(used)
    return None if not total or current is None else current / total


def _values(limits: Limits) -> Iterator[tuple[str, str]]:
    """Files of a group and what to write, for both versions, memory before memory with swap."""
    if limits.memory_mib is not None:
        size = str(limits.memory_mib << 20)
        yield from (("memory.limit_in_bytes", size), ("memory.memsw.limit_in_bytes", size))
        yield from (("memory.max", size), ("memory.swap.max", "0"))
    if limits.pids is not None:
        yield "pids.max", str(limits.pids)
    if limits.cpus is not None:
        quota = str(max(1000, int(limits.cpus * _CPU_PERIOD_MICROSECONDS)))
        yield from (("cpu.cfs_period_us", str(_CPU_PERIOD_MICROSECONDS)), ("cpu.cfs_quota_us", quota))
        yield "cpu.max", f"{quota} {_CPU_PERIOD_MICROSECONDS}"


def _own_groups(text: str) -> Iterator[tuple[frozenset[str], str]]:
    """The controllers of each hierarchy, none for version 2, and this process's group there (cgroups(7))."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield frozenset(controllers.split(",")) - {""}, path


def _mounts(text: str) -> Iterator[_Mount]:
    """Mounted hierarchies, from /proc/self/mountinfo (proc(5))."""
    for line in text.splitlines():
        first, _, last = line.partition(" - ")
        kind, _, options = last.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        _, _, _, top, path, *_ = first.split(" ")
        yield _Mount(
            Path(_unescaped(path)),
            _unescaped(top),
            1 if kind == "cgroup" else 2,
            frozenset(options.split(",")),
        )


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\134", "\\")


def _is_of(mount: _Mount, names: frozenset[str], controller: str) -> bool:
    """Whether the line of /proc/self/cgroup with these names belongs to a mount that has the controller."""
    return not names if mount.version == 2 else controller in names and controller in mount.controllers


def _parent(mount: _Mount, own: str, controller: str) -> Path | None:
    """The folder of the group in which sandboxes' groups are created; None if that is not possible."""
    relative = os.path.relpath(own, mount.top)
    if relative.startswith(".."):
        return None
    group = mount.path / relative
    if mount.version == 1:
        return group if _can_create(group) else None
    while group.is_relative_to(mount.path):
        if _passes_on(group, controller) and _can_create(group):
            return group
        if group == mount.path:
            break
        group = group.parent
    return None


def _passes_on(group: Path, controller: str) -> bool:
    """Whether groups in this group have the controller. Tries to switch it on."""
    file = group / "cgroup.subtree_control"
    try:
        if controller in read_kernel_file(file).split():
            return True
        if controller not in read_kernel_file(group / "cgroup.controllers").split():
            return False
        _write(file, f"+{controller}")
    except OSError:
        return False
    return True


def _can_create(group: Path) -> bool:
    """Whether this process may create groups there, and move processes into them."""
    if not os.access(group / _PROCESSES, os.W_OK):
        return False
    probe = group / f"decathlon-check-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
