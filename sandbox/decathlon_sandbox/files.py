"""`arrange`: folders and files put in place, in a thread of its own."""

from __future__ import annotations

import os
import stat
import threading

from decathlon_sandbox import params as read
from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.request import Request

    Step = Callable[["Arrangement"], None]


PIECE_BYTES = 1 << 23


def arrange(loop: Loop, request: Request, params: dict[str, Any]) -> None:
    """Do the steps in order, beside everything else; the first that fails is the answer."""
    arrangement = Arrangement([_step(step) for step in read.objects(params, "steps")])
    request.on_cancel = arrangement.give_up

    def work() -> None:
        fault = arrangement.fault()
        loop.hand_over(lambda: request.answer({}) if fault is None else request.fail(fault))

    threading.Thread(target=work, daemon=True).start()


class Arrangement:
    """The steps of one request. What was done before a failure stays done."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self._given_up = False

    def give_up(self) -> None:
        self._given_up = True

    def go_on(self) -> None:
        """Called before anything is touched: raises Fault once the request is given up."""
        if self._given_up:
            raise Fault(wire.CANCELLED, "the arrangement was given up")

    def fault(self) -> Fault | None:
        for number, step in enumerate(self._steps):
            try:
                self.go_on()
                step(self)
            except Fault as fault:
                fault.data.setdefault("step", number)
                return fault
            except (OSError, ValueError, RecursionError) as error:
                return Fault(wire.FILES, reason(error), step=number)
            except Exception as error:  # noqa: BLE001  (whoever asked must be answered)
                return Fault(wire.INTERNAL, f"{type(error).__name__}: {error}", step=number)
        return None


def _step(step: dict[str, Any]) -> Step:
    """A step of the wire, its parameters checked."""
    if "make" in step:
        return _make(read.path(step, "make"))
    if "copy" in step:
        return _copy(read.path(step, "copy"), read.path(step, "to"))
    if "remove" in step:
        return _remove(read.path(step, "remove"))
    if "write" in step:
        mode = read.whole_number(step, "mode", 0o7777) if step.get("mode") is not None else 0o644
        return _write(read.path(step, "write"), read.text(step, "text"), mode)
    if "absent" in step:
        return _absent(read.strings(step, "absent"), read.path(step, "under"), read.strings(step, "except"))
    raise Fault(wire.BAD_PARAMS, f"no such step: {', '.join(sorted(step)) or '(empty)'}")


def _make(folder: str) -> Step:
    return lambda arrangement: os.makedirs(folder, exist_ok=True)


def _copy(source: str, target: str) -> Step:
    def copy(arrangement: Arrangement) -> None:
        inside = os.path.realpath(target) + "/"
        if inside.startswith(os.path.realpath(source) + "/"):
            raise Fault(wire.FILES, f"{target} lies in {source}")
        _copy_folder(arrangement, source, target)

    return copy


def _copy_folder(arrangement: Arrangement, source: str, target: str) -> None:
    """Links are copied as links, and never followed where they are replaced."""
    with os.scandir(source) as entries:
        os.makedirs(target, exist_ok=True)
        for entry in entries:
            arrangement.go_on()
            into = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if os.path.islink(into) or not os.path.isdir(into):
                    _unlink(into)
                _copy_folder(arrangement, entry.path, into)
            elif entry.is_symlink():
                _unlink(into)
                os.symlink(os.readlink(entry.path), into)
            elif entry.is_file(follow_symlinks=False):
                _unlink(into)
                _copy_file(entry.path, into)
            else:
                raise Fault(wire.FILES, f"{entry.path} is neither file, folder nor link")
    _copy_stat(source, target)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        done = 0
        while sent := os.sendfile(writing.fileno(), reading.fileno(), done, PIECE_BYTES):
            done += sent
    _copy_stat(source, target)


def _copy_stat(source: str, target: str) -> None:
    found = os.stat(source)
    os.chmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


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
        os.chmod(folder, 0o700)  # one that its owner may not enter cannot be emptied
    with os.scandir(folder) as entries:
        for entry in entries:
            arrangement.go_on()
            if entry.is_dir(follow_symlinks=False):
                _remove_folder(arrangement, entry.path)
            else:
                _unlink(entry.path)
    os.rmdir(folder)


def _write(path: str, text: str, mode: int) -> Step:
    def write(arrangement: Arrangement) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = f"{path}.{os.urandom(4).hex()}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(text.encode("utf-8"))
            os.chmod(part, mode)
            os.replace(part, path)
        except BaseException:
            _unlink(part)
            raise

    return write


def _absent(unwanted: list[str], under: str, spared: list[str]) -> Step:
    def check(arrangement: Arrangement) -> None:
        names = {name for name in unwanted if not name.startswith("/")}
        paths = {_place(name) for name in unwanted if name.startswith("/")}
        closed = {os.path.realpath(folder) for folder in spared}
        ahead = [os.path.realpath(under)]
        while ahead:
            arrangement.go_on()
            for path, name, is_folder in _content(ahead.pop()):
                if path in closed:
                    continue
                if name in names or path in paths:
                    raise Fault(wire.FILES, f"{path} is there", path=path)
                if is_folder:
                    ahead.append(path)

    return check


def _place(path: str) -> str:
    """Where `path` really lies, whatever links lead there; itself may be one."""
    parent, name = os.path.split(path.rstrip("/"))
    return os.path.join(os.path.realpath(parent), name)


def _content(folder: str) -> list[tuple[str, str, bool]]:
    """Path, name and whether it is a folder (no link), of all in `folder`; one that is gone is empty."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.path, entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []
