"""The file operations of `arrange`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import RequestError, describe_error
from decathlon_sandbox.strict_json import JsonObject

COPY_CHUNK_BYTES = 1 << 23


def run_steps(steps: Iterable[JsonObject]) -> None:
    """Run the steps of `arrange` in order. Raises RequestError at the first that fails; undoes nothing."""
    for number, step in enumerate(steps):
        try:
            _run_step(step)
        except RequestError as error:
            error.data.setdefault("step", number)
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(wire.FILES, describe_error(error), {"step": number}) from None


def _run_step(step: JsonObject) -> None:
    if "make" in step:
        os.makedirs(step["make"], exist_ok=True)
    elif "copy" in step:
        _copy(step["copy"], step["to"])
    elif "remove" in step:
        _remove(step["remove"])
    elif "write" in step:
        _write(step["write"], step["text"])
    elif "absent" in step:
        _check_absent(step["absent"], step["under"])
    elif "unpack" in step:
        from decathlon_sandbox import archives

        archives.unpack(step["unpack"], step["tar"])
    else:
        raise RequestError(wire.BAD_PARAMS, f"no such step: {', '.join(step)}")


def _copy(source: str, target: str) -> None:
    if (os.path.realpath(target) + "/").startswith(os.path.realpath(source) + "/"):
        raise RequestError(wire.FILES, f"{target} is inside {source}")
    _copy_folder(source, target)


def _copy_folder(source: str, target: str) -> None:
    """Copy links as links; a link in the target is replaced and never followed."""
    with os.scandir(source) as entries:
        os.makedirs(target, exist_ok=True)
        for entry in entries:
            destination = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if os.path.islink(destination) or not os.path.isdir(destination):
                    _unlink(destination)
                _copy_folder(entry.path, destination)
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


def _remove(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        _remove_folder(path)
    else:
        _unlink(path)


def _remove_folder(folder: str) -> None:
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(folder, 0o700)  # its owner cannot empty it without these rights
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove_folder(entry.path)
            else:
                _unlink(entry.path)
    os.rmdir(folder)


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # A temporary file that is renamed: readers see the old or the new file, and a link is replaced.
    temporary = f"{path}.{os.urandom(4).hex()}"
    try:
        with open(temporary, "xb") as file:
            file.write(text.encode("utf-8"))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise


def _check_absent(names: list[str], under: str) -> None:
    pending = [under]
    while pending:
        for path, name, is_folder in _list_folder(pending.pop()):
            if name in names:
                raise RequestError(wire.FILES, f"{path} is there", {"path": path})
            if is_folder:
                pending.append(path)


def _list_folder(folder: str) -> list[tuple[str, str, bool]]:
    """Path, name and whether it is a folder (not a link) of each entry; a missing folder has none."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.path, entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []
