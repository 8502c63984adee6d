"""Program in a sandbox of gVisor: unpacks and packs files, stops processes, and protects the first process.

Sent to the sandbox as text, after `inside_archives`: Python 3.10, standard library. Subcommands:

    first ROOT FILTER COMMAND...
                         become COMMAND, the sandbox's first process, in the folder ROOT, without capabilities
                         and with a seccomp filter, which is given in base64
    unpack ROOT          unpack the tar on stdin into ROOT
    pack ROOT ENTRIES NAME_BYTES
                         write the tar of ROOT to stdout, unless it has more entries, or bytes of names
    stop SECONDS         stop all processes but a server's programs, such as this one, write `STOPPED`, and
                         wait until stdin ends, as it does when the server dies; so many seconds later let the
                         first process go on, which then ends if it has not heard from another server
    own FOLDER USER GROUP
                         give the folder, and what is in it, to a user

It ends with `FAILED` and a reason on stderr if the sandbox's files are in the way, and with `FULL` if they
leave no room.
"""

import base64
import ctypes
import errno
import os
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decathlon_mcp.plugins.inside_archives import (
        drop_capabilities,
        libc_call,
        pack_archive,
        unpack_archive,
    )

FAILED, FULL = 64, 65
STOPPED = b"stopped"
NOT_STARTED = 128
"""Exit code of `first` after an error of its own, as of runsc."""
HIDDEN_FOLDERS = ("fd", "fdinfo", "task", "ns")
HIDDEN_FILES = ("environ", "maps", "smaps", "auxv", "mem")
"""In /proc/1. gVisor gives them to every process of the same user, whether the first is dumpable or not."""
NOBODY = 0xFFFFFFFE
"""A user and group that nobody in a sandbox is."""
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
MNT_DETACH = 2
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
STAT_BYTES, COMMAND_LINE_BYTES = 4096, 1 << 20
STOP_SECONDS = 30
"""How long processes may take to stop; each acts on the signal when it runs next."""


def first(root, encoded_filter, *command):
    try:
        os.chdir(root)
        close_streams()
        hide_first_process()
        drop_capabilities()
        program = base64.b64decode(encoded_filter)
        header = struct.pack("@HP", len(program) // 8, ctypes.cast(program, ctypes.c_void_p).value)
        libc_call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)
        os.execvp(command[0], command)
    except (OSError, AttributeError, KeyError) as error:
        print(f"the sandbox's first process cannot be started: {error}", file=sys.stderr)
        sys.exit(NOT_STARTED)


def close_streams():
    """Keep other processes from opening the standard streams again.

    gVisor has a directory in /proc for each of the first process's threads too, which nothing can be mounted
    over before they run: through these, the agent could write to the driver's connection.
    """
    for descriptor in range(3):
        os.fchmod(descriptor, 0)
        os.fchown(descriptor, NOBODY, NOBODY)


def hide_first_process():
    """Mount empty folders and an unreadable file over what other processes could read of this process.

    Also make the kernel's settings read-only, one of which is who may trace whom.
    """
    for name in HIDDEN_FOLDERS:
        libc_call("mount", b"none", b"/proc/1/" + name.encode(), b"tmpfs", MS_RDONLY, b"mode=000,size=4k")
    libc_call("mount", b"none", b"/tmp", b"tmpfs", 0, b"mode=700,size=4k")
    os.close(os.open("/tmp/hidden", os.O_WRONLY | os.O_CREAT, 0))
    for name in HIDDEN_FILES:
        libc_call("mount", b"/tmp/hidden", b"/proc/1/" + name.encode(), None, MS_BIND, None)
    libc_call("umount2", b"/tmp", MNT_DETACH)
    libc_call("mount", b"/proc/sys", b"/proc/sys", None, MS_BIND, None)
    libc_call("mount", None, b"/proc/sys", None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)


def unpack(root):
    unpack_archive(sys.stdin.buffer, root)


def pack(root, max_entries, max_name_bytes):
    pack_archive(root, sys.stdout.buffer, int(max_entries), int(max_name_bytes))
    sys.stdout.buffer.flush()


def own(folder, user, group):
    for top, folders, files in os.walk(folder):
        for path in (top, *(f"{top}/{name}" for name in folders + files)):
            os.lchown(path, int(user), int(group))


def stop(seconds):
    for pid, _, parent in processes():
        # The program of an earlier server must not wait any more.
        if is_of_server(pid, parent) and pid != os.getpid() and b"\0stop\0" in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    signalled = set()
    deadline = time.monotonic() + STOP_SECONDS
    # A stopped process starts no other, so that the rounds end.
    while running := [
        pid
        for pid, state, parent in processes()
        if not is_of_server(pid, parent) and not is_stopped(pid, state, signalled)
    ]:
        if time.monotonic() > deadline:
            raise SystemExit("the processes do not stop")
        for pid in running:
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                continue
            signalled.add(pid)
        time.sleep(0.002)
    os.write(1, STOPPED + b"\n")
    while os.read(0, 1):
        pass
    time.sleep(float(seconds))
    os.kill(1, signal.SIGCONT)


def is_stopped(pid, state, signalled):
    # An uninterruptible process acts on the signal before it can do anything else.
    return state in "TtZX" or (state == "D" and pid in signalled)


def is_of_server(pid, parent):
    """Whether a server runs it: only such processes, and the first one, have no parent inside."""
    return parent == 0 and pid != 1


def processes():
    """Number, state and parent of each process."""
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read(STAT_BYTES).rpartition(")")[2].split()[:2]
        except OSError:
            continue
        yield int(name), state, int(parent)


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(COMMAND_LINE_BYTES)
    except OSError:
        return b""


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    try:
        {"first": first, "unpack": unpack, "pack": pack, "own": own, "stop": stop}[command](*rest)
    except OverflowError as error:
        print(error, file=sys.stderr)
        sys.exit(FAILED)
    except OSError as error:
        print(f"{error.filename or ''}: {error.strerror}".strip(": "), file=sys.stderr)
        sys.exit(FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FAILED)
