"""Command lines and snapshots of one sandbox: for bubblewrap, for runsc in it, and for programs inside.

bubblewrap gives runsc namespaces in which it is root, and nothing of this machine but its own program and the
image. So neither needs to be root here, and what leaves gVisor's kernel is still in bubblewrap's namespaces.

Snapshots are the files that runsc writes, and a description by which they are checked: runsc finds most
damage only after it has begun to restore, and changed memory not at all. It restores what was saved with the
same version, options and configuration only, and says little about the reason.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath

from decathlon_sandbox import wire

from decathlon_mcp.errors import ImageError, ProviderUnavailableError, SnapshotError
from decathlon_mcp.plugins.inside_archives import program_inside
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.sandboxes.host.command import HOST_NAME, PROBE_SECONDS, SHARED_MEMORY_BYTES
from decathlon_mcp.sandboxes.host.image_folder import ImageFolder
from decathlon_mcp.sandboxes.host.mounts import CopiedFiles, WritableFolder, writable_folders
from decathlon_mcp.sandboxes.host.seccomp import compile_filter
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.types import JsonObject, as_object

RUNSC, IMAGE, BUNDLE, STATE = "/runsc", "/image", "/bundle", "/state"
SAVED, SNAPSHOT = "/saved", "/snapshot"
"""Paths in the namespaces of runsc."""
CONTAINER = "sandbox"
STATE_FILE = f"state/{CONTAINER}_sandbox:{CONTAINER}.state"
"""In the root of runsc's namespaces."""
OPTIONS = (
    f"--root={STATE}",
    # Loopback only, and nothing of the namespaces' network.
    "--network=none",
    # The groups of all of runsc's processes are set outside.
    "--ignore-cgroups",
    "--platform=systrap",
    # The home is a folder of the image: what is written there stays in the sandbox's memory.
    "--overlay2=all:memory",
)
"""A saved sandbox can only be restored with the same options."""
DESCRIPTION_FILE = "description.json"
SAVE_OPTIONS = ("--leave-running", "--compression=none")
"""To compress costs five times the time, for files of four fifths to a quarter of the size."""
IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
"""What runsc writes with these options."""
_DESCRIPTION_BYTES = 64 << 10
PYTHON = "python3"
OPEN_FILES = 1 << 20
"""As in a container."""
_PROGRAM = program_inside("decathlon_mcp.plugins.gvisor")
_NAMESPACES = ("user", "pid", "ipc", "uts", "net")
PROGRAM = "runsc"
MINIMAL_VERSION = 20240729
"""The tested release, and the oldest with all options."""
INSTALL_RUNSC = (
    "install runsc of 2024-07-29 or later: apt-get install runsc on Debian 13, otherwise see "
    "https://gvisor.dev/docs/user_guide/install"
)
"""Debian 12 has runsc of 2022, without the platform systrap."""
TIMER_SLACK_NS = 5_000_000
"""How late a timer of gVisor's kernel may be. With the 50 us of other processes it wakes up a thousand times
a second, also while nothing runs in it (https://github.com/google/gvisor/pull/13470), and takes 26 ms of a
core each second instead of 0.6. A sleep of 1 ms in a sandbox takes some 6 ms; calls are not slower."""
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
ERROR_BYTES = 4096
_CHUNK_BYTES = 1 << 16
_libc = ctypes.CDLL(None)


def outer_command(
    program: str,
    runsc: Path,
    spec: SandboxSpec,
    image: ImageFolder,
    stack: ExitStack,
    *,
    status: int,
    started: int,
    log: int,
    saved: Path | None = None,
    snapshot: Sequence[tuple[str, int]] = (),
) -> tuple[list[str], Sequence[int]]:
    """The command line of bubblewrap, and descriptors of further files for it, which `stack` closes.

    `status`: bubblewrap writes the first process's number and exit code there. `started`: runsc writes
    something there when gVisor's kernel runs. `log`: a file in which runsc notes how the sandbox's first
    process ended. `saved`: the folder that is `SAVED` for runsc. `snapshot`: names and descriptors of the
    files from which the sandbox is restored.
    """
    copied = CopiedFiles(stack)
    bundle = json.dumps(bundle_config(spec, image)).encode()
    command = [program, *(f"--unshare-{name}" for name in _NAMESPACES), "--unshare-cgroup-try"]
    command += ["--uid", "0", "--gid", "0", "--hostname", HOST_NAME, "--as-pid-1", "--new-session"]
    command += ["--cap-add", "ALL"]
    if not spec.survives:
        command.append("--die-with-parent")
    command += ["--json-status-fd", str(status), "--clearenv"]
    command += ["--ro-bind", str(runsc), RUNSC, "--ro-bind", str(image.root), IMAGE]
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", STATE, "--dir", "/tmp"]
    command += ["--perms", "0644", "--ro-bind-data", copied.add_content(bundle), f"{BUNDLE}/config.json"]
    if saved is not None:
        command += ["--bind", str(saved), SAVED]
    for name, descriptor in snapshot:
        command += ["--symlink", f"/proc/self/fd/{descriptor}", f"{SNAPSHOT}/{name}"]
    verb, options = ("restore", [f"--image-path={SNAPSHOT}"]) if snapshot else ("run", [])
    command += ["--chdir", "/", "--", RUNSC, *OPTIONS]
    # Of this process only: what runsc's others note depends on what runs in the sandbox, without a bound.
    command += [f"--debug-log=/proc/self/fd/{log}", f"--debug-command={verb}"]
    command += [verb, *options, f"--bundle={BUNDLE}", f"--pid-file=/proc/self/fd/{started}", CONTAINER]
    return command, (*copied.descriptors, *(descriptor for _, descriptor in snapshot))


def inner_command(namespaces: Sequence[tuple[str, int]], *arguments: str) -> list[str]:
    """A command line of runsc in the namespaces of a sandbox: kind and descriptor of each."""
    entered = [f"--{kind}=/proc/self/fd/{descriptor}" for kind, descriptor in namespaces]
    return ["nsenter", "--preserve-credentials", *entered, "--", RUNSC, *OPTIONS, *arguments]


def inside_command(image: ImageFolder, *arguments: str) -> list[str]:
    """A command line of `inside.py` in a sandbox. Raises ImageError if the image has no Python."""
    # In the home an agent could replace it. Nothing else of the image can be changed: this is Python.
    python = image.find_program(PYTHON, outside=image.user.home)
    if python is None:
        raise ImageError(
            f"image {image.location} has no {PYTHON} on its PATH outside of the home folder",
            image=str(image.location),
        )
    return [f"/{python.relative_to(image.root)}", "-I", "-S", "-c", _PROGRAM, *arguments]


def bundle_config(spec: SandboxSpec, image: ImageFolder) -> JsonObject:
    """The configuration of the sandbox (OCI runtime specification, 1.0)."""
    user, limits = image.user, spec.limits
    variables = {**image.environment, "HOME": str(user.home), "HOSTNAME": HOST_NAME}
    rlimits: list[JsonObject] = [{"type": "RLIMIT_NOFILE", "soft": OPEN_FILES, "hard": OPEN_FILES}]
    if limits.pids is not None:
        rlimits.append({"type": "RLIMIT_NPROC", "soft": limits.pids, "hard": limits.pids})
    if limits.memory_mib is not None:
        # gVisor's kernel does not end processes when memory is short, so the driver does.
        variables[wire.MEMORY_VARIABLE] = str(limits.memory_mib)
    command = [
        "first",
        str(spec.root),
        base64.b64encode(compile_filter(devices=False)).decode(),
        *spec.command,
    ]
    # For what `first` does before it drops them.
    capabilities = ["CAP_SYS_ADMIN", "CAP_SETPCAP", "CAP_CHOWN"]
    mounts: list[JsonObject] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        _memory_mount(WritableFolder(PurePosixPath("/dev/shm"), SHARED_MEMORY_BYTES, 0o1777), 0, 0),
    ]
    home = image.real_path(user.home)
    for folder in writable_folders(image, spec.root, limits):
        has_content = folder.path == home and (image.root / home.relative_to("/")).is_dir()
        mounts.append(
            {"destination": str(home), "type": "bind", "source": f"{IMAGE}{home}", "options": ["bind", "rw"]}
            if has_content
            else _memory_mount(folder, user.user, user.group)
        )
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": user.user, "gid": user.group},
            "args": inside_command(image, *command),
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": rlimits,
            "noNewPrivileges": True,
        },
        "root": {"path": IMAGE, "readonly": True},
        "hostname": HOST_NAME,
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
    }


def _memory_mount(folder: WritableFolder, user: int, group: int) -> JsonObject:
    options = [f"mode={folder.mode:o}", f"size={folder.size_bytes}", "nosuid", "nodev"]
    owner = [f"uid={user}", f"gid={group}"] if user or group else []
    return {
        "destination": str(folder.path),
        "type": "tmpfs",
        "source": "tmpfs",
        "options": [*options, *owner],
    }


def find_runsc() -> Path:
    """The path of runsc. Raises ProviderUnavailableError."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ProviderUnavailableError(f"there is no {PROGRAM} on the PATH: {INSTALL_RUNSC}")
    return Path(program).resolve()


@cache
def runsc_version(program: Path) -> tuple[str, bool]:
    """What runsc says about its version, and whether that is `MINIMAL_VERSION` or later. Blocks."""
    try:
        command = [str(program), "--version"]
        result = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProviderUnavailableError(f"{program} cannot be run: {error}; {INSTALL_RUNSC}") from error
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    # "runsc version release-20240729.0", or Debian's "0.0~20240729.0".
    dates = re.findall(r"\d{8}", lines[0]) if lines else []
    return lines[0] if lines else "of unknown version", bool(dates) and int(dates[0]) >= MINIMAL_VERSION


class Program:
    """A run of `inside.py` in a sandbox. Its methods block. `reason`: what it wrote to stderr at its end."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._popen = popen
        self._stdin, self.stdout, self._stderr = popen.stdin, popen.stdout, popen.stderr
        self.reason = ""

    def send(self, chunks: Iterable[bytes]) -> None:
        # It does not read on after an error.
        with suppress(BrokenPipeError):
            for chunk in chunks:
                self._stdin.write(chunk)

    def received(self) -> Iterator[bytes]:
        """What it writes to stdout."""
        while chunk := self.stdout.read(_CHUNK_BYTES):
            yield chunk

    def finish(self) -> int:
        """Wait until it ends; returns its exit code."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        self.reason = self._stderr.read(ERROR_BYTES).decode("utf-8", "replace").strip()
        return self._popen.wait()

    def close(self) -> None:
        """End it: what runs inside ends with its streams."""
        self._popen.kill()
        for stream in (self._stdin, self.stdout, self._stderr):
            with suppress(BrokenPipeError):
                stream.close()
        self._popen.wait()


@contextmanager
def late_timers() -> Generator[None]:
    """What this thread starts in the body, and all that it starts, has `TIMER_SLACK_NS`."""
    before_ns = _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_TIMERSLACK, before_ns, 0, 0, 0)


def describe_snapshot(folder: Path, spec: SandboxSpec, image: ImageFolder, version: str) -> None:
    """Write the description of what runsc has saved in a folder. Raises OSError. Blocks."""
    content = {**_kind(spec, image, version), "files": {name: _digest(folder / name) for name in IMAGE_FILES}}
    (folder / DESCRIPTION_FILE).write_text(json.dumps(content), "utf-8")


def move_snapshot(saved: Path, target: Path) -> Snapshot:
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


def check_snapshot(snapshot: Snapshot, spec: SandboxSpec, image: ImageFolder, version: str) -> None:
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


def open_snapshot(snapshot: Snapshot, stack: ExitStack) -> Sequence[tuple[str, int]]:
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
