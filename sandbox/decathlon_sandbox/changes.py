"""`snapshot` and `clean`: find and remove what a command left on the sandbox's writable file systems.

A snapshot is no listing but a moment. The kernel stamps every inode that is created or changed with the time
of its clock (ctime), which no program can set, so that one walk afterwards finds all changes. Listing the
files of a large image beforehand would take seconds in every opening, also where no `clean` follows.
"""

from __future__ import annotations

import os
import stat
import time

from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import RequestError
from decathlon_sandbox.strict_json import JsonObject

SCRATCH = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run", "/var/cache", "/var/log")
"""Folders whose changed content is removed: nothing in them is expected to last."""
HOME_SCRATCH = (".cache", ".npm")
"""More of them, in the home folder."""
BYTECODE = "__pycache__"
MAX_PATHS = 100
"""Longest list of paths in a reply."""
# linux/time.h: the clock that inodes are stamped with. The `time` module does not name it.
_CLOCK_REALTIME_COARSE = 5
_TICK_SECONDS = 0.001
_CLOCK_READINGS = 10
_CLOCK_STEP_NS = 1_000_000
"""A clock that was set back by more than this since the snapshot is an error."""
_KERNEL_FILE_SYSTEMS = frozenset(
    {"autofs", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "fusectl", "proc", "pstore"}
    | {"securityfs", "selinuxfs", "sysfs", "tracefs"}
)
_IPC_TABLES = {"shm": "shared memory segment", "msg": "message queue", "sem": "semaphore set"}
# Arguments of shmctl(2), msgctl(2) and semctl(2) that ask for what there is, without the last argument, and
# the place of the number of objects in the answer: SHM_INFO, MSG_INFO, SEM_INFO.
_IPC_COUNTS = {"shm": ((0, 14), 0), "msg": ((0, 12), 0), "sem": ((0, 0, 19), 7)}


def snapshot() -> dict[str, int]:
    """The present moment, later than every change so far and not later than any to come."""
    # Since Linux 6.13 some changes are stamped with the precise time, which the coarse clock reaches later,
    # by a tick or, if ticks are late, more.
    now = time.time_ns()
    while (moment := _coarse_ns()) <= now:
        time.sleep(_TICK_SECONDS)
        now = min(now, time.time_ns())  # the clock may be set back
    return {"moment_ns": moment, "offset_ns": _offset_ns()}


class Cleaning:
    """One walk over the writable file systems, or over given folders."""

    def __init__(self, params: JsonObject) -> None:
        self._moment_ns: int = params["since"]["moment_ns"]
        self._offset_ns: int = params["since"]["offset_ns"]
        self._under: list[str] | None = params["under"]
        self._excepted = {os.path.realpath(path) for path in params["except"]}
        # Given folders can be on a machine that is no sandbox, where /tmp has other files too.
        own = [os.environ["TMPDIR"]] if "TMPDIR" in os.environ else []
        homes = [os.path.expanduser(f"~/{name}") for name in HOME_SCRATCH]
        folders = [*own, *SCRATCH, *homes] if self._under is None else own
        self._scratch = {os.path.realpath(path) for path in folders}
        self._mount_points = {point for point, _ in _mounts()}
        self._sockets = _listening_sockets()
        self._removed = 0
        self._paths: list[str] = []
        self._path_count = 0

    def run(self) -> JsonObject:
        """Walk everything. Raises RequestError if changes cannot be recognized: the clock was set back."""
        if _offset_ns() < self._offset_ns - _CLOCK_STEP_NS:
            raise RequestError(wire.FILES, "the machine's clock was set back in the meantime")
        if self._under is None:
            for point, writable in _mounts():
                if writable and point not in self._excepted:
                    self._visit_root(point)
            self._report_ipc()
        else:
            for folder in self._under:
                self._visit_root(os.path.realpath(folder))
        return {"removed": self._removed, "paths": self._paths, "count": self._path_count}

    def _visit_root(self, path: str) -> None:
        """Clean a mount point or a given folder, which itself stays."""
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            self._clean_folder(path, self._is_scratch(path))
            if self._has_changed(status):
                self._reset_folder(path)
        elif stat.S_ISREG(status.st_mode) and self._has_changed(status):
            self._report(path)

    def _is_scratch(self, path: str) -> bool:
        return any(path == folder or path.startswith(folder + "/") for folder in self._scratch)

    def _has_changed(self, status: os.stat_result) -> bool:
        return status.st_ctime_ns >= self._moment_ns

    def _clean_folder(self, folder: str, disposable: bool) -> bool:
        """Remove and report changes below `folder`; return whether anything is still in it."""
        disposable = disposable or folder in self._scratch
        occupied = False
        try:
            entries = os.scandir(folder)
        except (PermissionError, FileNotFoundError):
            return True  # where this user may not look, it could not write either
        with entries:
            for entry in entries:
                if entry.path in self._excepted or entry.path in self._mount_points:
                    occupied = True
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    occupied |= self._clean_subfolder(entry.path, status, disposable)
                else:
                    occupied |= self._clean_file(entry.path, status, disposable)
        return occupied

    def _clean_subfolder(self, path: str, status: os.stat_result, disposable: bool) -> bool:
        # A folder that was there before is changed, too, when an entry is added or removed. If it is empty it
        # could also be new, and its name could be an answer.
        bytecode = os.path.basename(path) == BYTECODE
        occupied = self._clean_folder(path, disposable)
        if not self._has_changed(status) or path in self._scratch:
            return True
        if occupied:
            self._reset_folder(path)
            return True
        if disposable or bytecode:
            try:
                os.rmdir(path)
            except OSError:  # a living process has just put something there
                return True
            return False
        self._report(path)
        return True

    def _reset_folder(self, path: str) -> None:
        """Give a changed folder the present time, and report it if it has attributes of its own."""
        try:
            os.utime(path)
            if any(name.startswith("user.") for name in os.listxattr(path, follow_symlinks=False)):
                self._report(path)
        except OSError:
            pass  # not this user's folder, or a file system without attributes

    def _clean_file(self, path: str, status: os.stat_result, disposable: bool) -> bool:
        """Handle one file, link, socket or FIFO; return whether it is still there."""
        if not self._has_changed(status) or stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            return True
        in_use = stat.S_ISSOCK(status.st_mode) and path in self._sockets
        if (disposable or _is_bytecode(path) or _is_lock(path, status)) and not in_use:
            try:
                os.unlink(path)
            except FileNotFoundError:  # by a living process
                return False
            self._removed += 1
            return False
        self._report(path)
        return True

    def _report(self, path: str) -> None:
        self._path_count += 1
        if len(self._paths) < MAX_PATHS:
            self._paths.append(os.fsencode(path).decode("utf-8", "backslashreplace"))

    def _report_ipc(self) -> None:
        """Report System V objects; a sandbox has none before its first command runs."""
        for table, name in _IPC_TABLES.items():
            if os.path.exists("/proc/sysvipc"):
                ids = [line.split()[1] for line in _lines(f"/proc/sysvipc/{table}")[1:]]
            else:  # gVisor has no such tables
                ids = [str(number) for number in range(_count_ipc(table))]
            for object_id in ids:
                self._report(f"{name} {object_id}")


def _count_ipc(table: str) -> int:
    """How many System V objects of a kind there are; 0 if that is not known."""
    try:
        import ctypes

        call = getattr(ctypes.CDLL(None), f"{table}ctl")
    except (ImportError, OSError, AttributeError):
        return 0
    arguments, position = _IPC_COUNTS[table]
    answer = (ctypes.c_int * 64)()
    return 0 if call(*arguments, answer) < 0 else max(answer[position], 0)


def _is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and os.path.basename(os.path.dirname(path)) == BYTECODE


def _is_lock(path: str, status: os.stat_result) -> bool:
    # `uv run` creates such a file in the environment that it uses.
    return os.path.basename(path) == ".lock" and stat.S_ISREG(status.st_mode) and not status.st_size


def _mounts() -> list[tuple[str, bool]]:
    """Mount points, and whether files can be written there (proc(5), `mountinfo`)."""
    mounts: list[tuple[str, bool]] = []
    for line in _lines("/proc/self/mountinfo"):
        fields, _, file_system = line.partition(" - ")
        point, options = fields.split(" ")[4:6]
        kind, _, super_options = file_system.split(" ")[:3]
        read_only = "ro" in (*options.split(","), *super_options.split(","))
        mounts.append((_unescape(point), not read_only and kind not in _KERNEL_FILE_SYSTEMS))
    return mounts


def _unescape(path: str) -> str:
    """Replace the octal escapes for space, tab, newline and backslash."""
    head, *parts = path.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in parts)


def _listening_sockets() -> set[str]:
    """Paths of the Unix sockets that a process has bound."""
    fields = (line.split(None, 7) for line in _lines("/proc/net/unix")[1:])
    return {field[7] for field in fields if len(field) == 8}


def _lines(path: str) -> list[str]:
    try:
        # Only line feeds end lines: the kernel writes other separators as they are in names.
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return [line for line in file.read().split("\n") if line]
    except OSError:
        return []


def _coarse_ns() -> int:
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def _offset_ns() -> int:
    """How far the wall clock is ahead of the monotonic one. Only setting the clock changes it."""
    # A pause between the two readings, as on a busy machine, makes the difference smaller.
    return max(
        time.clock_gettime_ns(time.CLOCK_REALTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        for _ in range(_CLOCK_READINGS)
    )
