"""`arrange`: file operations in order, in their own thread; and `pack`."""

from __future__ import annotations

import os
import stat

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError, answer_in_thread, describe_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from decathlon_sandbox.event_loop import EventLoop
    from decathlon_sandbox.rpc import Params, Request

    Step = Callable[["Arrangement"], None]


COPY_CHUNK_BYTES = 1 << 23


def arrange(loop: EventLoop, request: Request, params: Params) -> None:
    """Run the steps in order without blocking the event loop; the first failure is the response.

    A failure does not undo earlier steps.
    """
    arrangement = Arrangement()
    steps = [_parse_step(step) for step in params.objects("steps")]
    request.on_cancel = arrangement.cancel

    def work() -> Callable[[], object]:
        for number, step in enumerate(steps):
            try:
                arrangement.check_cancelled()
                step(arrangement)
            except RequestError as error:
                error.data.setdefault("step", number)
                raise
            except (OSError, ValueError, RecursionError) as error:
                raise RequestError(wire.FILES, describe_error(error), {"step": number}) from None
        return lambda: request.reply({})

    answer_in_thread(loop, request, work)


def pack(loop: EventLoop, request: Request, params: Params) -> None:
    """Pack a folder without blocking the event loop."""
    from decathlon_sandbox import archives

    folder = params.path("folder")
    max_bytes = params.integer("max_bytes", maximum=wire.MAX_ARCHIVE_BYTES)

    def work() -> Callable[[], object]:
        result = {"tar": archives.pack(folder, max_bytes)}
        return lambda: request.reply(result)

    answer_in_thread(loop, request, work)


class Arrangement:
    """Whether an arrangement is cancelled. Steps look before every file."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def check_cancelled(self) -> None:
        """Raise RequestError once the request is cancelled."""
        if self._cancelled:
            raise RequestError(wire.CANCELLED, "the arrangement was cancelled")


def _parse_step(step: Params) -> Step:
    """Validate a step's parameters and return its function."""
    if "make" in step:
        return _make(step.path("make"))
    if "copy" in step:
        return _copy(step.path("copy"), step.path("to"))
    if "remove" in step:
        return _remove(step.path("remove"))
    if "write" in step:
        mode = step.integer("mode", maximum=0o7777) if step.has("mode") else 0o644
        return _write(step.path("write"), step.string("text"), mode)
    if "absent" in step:
        return _check_absent(step.strings("absent"), step.path("under"), step.strings("except"))
    if "unpack" in step:
        return _unpack(step)
    raise RequestError(wire.BAD_PARAMS, f"no such step: {', '.join(step.names()) or '(empty)'}")


def _make(folder: str) -> Step:
    return lambda arrangement: os.makedirs(folder, exist_ok=True)


def _copy(source: str, target: str) -> Step:
    def copy(arrangement: Arrangement) -> None:
        if (os.path.realpath(target) + "/").startswith(os.path.realpath(source) + "/"):
            raise RequestError(wire.FILES, f"{target} is inside {source}")
        _copy_folder(arrangement, source, target)

    return copy


def _copy_folder(arrangement: Arrangement, source: str, target: str) -> None:
    """Copy links as links; a link in the target is replaced and never followed."""
    with os.scandir(source) as entries:
        os.makedirs(target, exist_ok=True)
        for entry in entries:
            arrangement.check_cancelled()
            destination = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if os.path.islink(destination) or not os.path.isdir(destination):
                    _unlink(destination)
                _copy_folder(arrangement, entry.path, destination)
            elif entry.is_symlink():
                _unlink(destination)
                os.symlink(os.readlink(entry.path), destination)
            elif entry.is_file(follow_symlinks=False):
                _unlink(destination)
                _copy_file(entry.path, destination)
            else:
                raise RequestError(wire.FILES, f"{entry.path} is neither file, folder nor link")
    _copy_stat(source, target)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as source_file, open(target, "xb", buffering=0) as target_file:
        offset = 0
        while sent := os.sendfile(target_file.fileno(), source_file.fileno(), offset, COPY_CHUNK_BYTES):
            offset += sent
    _copy_stat(source, target)


def _copy_stat(source: str, target: str) -> None:
    status = os.stat(source)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _remove(path: str) -> Step:
    def remove(arrangement: Arrangement) -> None:
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISDIR(mode):
            _remove_folder(arrangement, path)
        else:
            _unlink(path)

    return remove


def _remove_folder(arrangement: Arrangement, folder: str) -> None:
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(folder, 0o700)  # its owner cannot empty it without these rights
    with os.scandir(folder) as entries:
        for entry in entries:
            arrangement.check_cancelled()
            if entry.is_dir(follow_symlinks=False):
                _remove_folder(arrangement, entry.path)
            else:
                _unlink(entry.path)
    os.rmdir(folder)


def _write(path: str, text: str, mode: int) -> Step:
    def write(arrangement: Arrangement) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # A temporary file that is renamed: readers see the old or the new file, and a link is replaced.
        temporary = f"{path}.{os.urandom(4).hex()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(text.encode("utf-8"))
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            _unlink(temporary)
            raise

    return write


def _unpack(step: Params) -> Step:
    from decathlon_sandbox import archives

    folder, archive = step.path("unpack"), archives.decode(step.string("tar"))
    return lambda arrangement: archives.unpack(folder, archive, arrangement.check_cancelled)


def _check_absent(forbidden: list[str], under: str, excepted: list[str]) -> Step:
    def check(arrangement: Arrangement) -> None:
        names = {name for name in forbidden if not name.startswith("/")}
        paths = {_resolve_parent(name) for name in forbidden if name.startswith("/")}
        skipped = {os.path.realpath(folder) for folder in excepted}
        pending = [os.path.realpath(under)]
        while pending:
            arrangement.check_cancelled()
            for path, name, is_folder in _list_folder(pending.pop()):
                if path in skipped:
                    continue
                if name in names or path in paths:
                    raise RequestError(wire.FILES, f"{path} is there", {"path": path})
                if is_folder:
                    pending.append(path)

    return check


def _resolve_parent(path: str) -> str:
    """Resolve links in the folder of `path`, but not `path` itself."""
    parent, name = os.path.split(path.rstrip("/"))
    return os.path.join(os.path.realpath(parent), name)


def _list_folder(folder: str) -> list[tuple[str, str, bool]]:
    """Path, name and whether it is a folder (not a link) of each entry; a missing folder has none."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.path, entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []
