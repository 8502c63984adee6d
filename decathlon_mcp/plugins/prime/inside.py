"""Program in a Prime sandbox: starts the first process, attaches streams to it, packs and unpacks files.

Sent to the sandbox as text, after `inside_archives`: Python 3.10, standard library. Subcommands:

    start CONFIG                start the first process; print `ready`
    attach SURVIVES             connect stdin, stdout and stderr of this process to the first process
    status                      print the state of the first process as JSON
    pause                       kill the first process
    unpack PREFIX ROOT          unpack PREFIX-* (a tar in parts) into ROOT, and remove the parts
    pack PREFIX ROOT LIMIT      pack ROOT into PREFIX-*

Each can be run again if its answer was lost. The first process is the first of a PID namespace: it cannot be
killed from inside, and with it, everything inside ends. It has no capabilities, and a /tmp and a /proc of its
own. It does not see FOLDER, where there are:

    stdin, stdout, stderr       named pipes, its standard streams
    pid                         its number
    ended                       how it ended, as JSON, once it has
    paused                      exists once it has been killed by `pause`
    attachment                  number of the process that is attached, which has a lock on this file
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decathlon_mcp.plugins.inside_archives import (
        CHUNK,
        drop_capabilities,
        libc_call,
        pack_archive,
        unpack_archive,
    )

FOLDER = "/tmp/decathlon"
PART_BYTES = 8 << 20
HAND_OVER_SECONDS = 5
"""How long an attachment may take to pass on its input when another attachment replaces it."""
QUIET_SECONDS = 0.2
"""Without input for so long, no more comes: the service may answer before it has passed everything on."""
PAUSE_SECONDS = 30
"""How long the processes inside may take to end after SIGKILL."""
NEWNS, NEWIPC, NEWPID = 0x20000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC_PRIVATE = 2, 4, 8, 0x4000 | 0x40000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 38, 47


# The first process


def start(config):
    if os.path.exists(f"{FOLDER}/pid"):
        print("ready")
        return
    config = json.loads(config)
    os.makedirs(config["root"], exist_ok=True)
    program = config["command"][0]
    if shutil.which(os.path.join(config["root"], program) if "/" in program else program) is None:
        # The first process is executed only when something attaches.
        print(f"it has no {program} on its PATH")
        return
    for name in ("stdin", "stdout", "stderr"):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(f"{FOLDER}/{name}", 0o600)
    report, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        try:
            supervise(config, done)
        except BaseException as error:
            os.write(done, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    os.close(done)
    print(os.read(report, 2000).decode(), flush=True)


def supervise(config, done):
    """Start the first process, and write a report when it has ended. Never returns."""
    os.closerange(3, done)  # the lock of this command, among others
    # Both ends, so that its output does not end or break while nobody is attached, and not before the report.
    outputs = [os.open(f"{FOLDER}/{name}", os.O_RDWR) for name in ("stdout", "stderr")]
    oom_kills = out_of_memory_kills()
    # From here on, the next process is the first of a new PID namespace; this process starts no other.
    libc_call("unshare", NEWPID)
    pid = os.fork()
    if pid == 0:
        run_first_process(config, outputs)
    write_file(f"{FOLDER}/pid", str(pid))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.write(done, b"ready")
    os.close(done)
    # It is not reaped before this process ends, so that no other process has its number until then.
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    while os.path.exists(f"{FOLDER}/paused"):
        signal.pause()  # without an end of its streams
    killed = end.si_code != os.CLD_EXITED
    oom = killed and end.si_status == signal.SIGKILL and out_of_memory_kills() > oom_kills
    write_file(f"{FOLDER}/ended", json.dumps({"code": end.si_status + 128 * killed, "oom": oom}))
    os._exit(0)


def run_first_process(config, outputs):
    """In the new process. Never returns."""
    try:
        os.setsid()
        libc_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number, descriptor in enumerate(outputs, 1):
            os.dup2(descriptor, number)
        # This waits for the first attachment, so that nothing is lost of a program that ends at once.
        os.dup2(os.open(f"{FOLDER}/stdin", os.O_RDONLY), 0)
        if config["survives"]:
            # With both ends its input does not end with an attachment.
            os.dup2(os.open(f"{FOLDER}/stdin", os.O_RDWR), 0)
        os.closerange(3, 4096)
        libc_call("unshare", NEWNS | NEWIPC)
        libc_call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
        libc_call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        size = b"mode=1777,size=%dm" % config["scratch_mib"]
        libc_call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, size)
        os.chdir(config["root"])
        give_up_privileges()
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        os.execvp(config["command"][0], config["command"])
    except OSError as error:
        os.write(2, f"decathlon: cannot start: {error}\n".encode())
        os._exit(127 if error.errno == errno.ENOENT else 126)


def find_first_process():
    """A pidfd; None if the first process has ended."""
    try:
        with open(f"{FOLDER}/pid") as file:
            pidfd = os.pidfd_open(int(file.read()))
    except ProcessLookupError:
        return None
    # Without a report, the number belonged to it when the descriptor was opened.
    return None if os.path.exists(f"{FOLDER}/ended") else pidfd


def state():
    end = None
    if find_first_process() is None:
        # There is no report if the supervisor was killed, as the kernel may do when memory is short.
        end = {}
        with contextlib.suppress(FileNotFoundError), open(f"{FOLDER}/ended") as file:
            end = json.load(file)
    return {"end": end, "paused": os.path.exists(f"{FOLDER}/paused")}


def status():
    print(json.dumps(state()))


def pause():
    write_file(f"{FOLDER}/paused", "")
    pidfd = find_first_process()
    if pidfd is not None:
        # The kernel lets the first process of a PID namespace end after all others in it.
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], PAUSE_SECONDS)[0]:
            raise SystemExit("the processes inside do not end")
    status()


# Its streams


def attach(survives):
    """Print the state, one line of JSON, then carry the streams until the first process ends.

    Nothing says that the input of this process has ended, except for SIGTERM.
    """
    # A read is continued after a signal. Then what has arrived is still read, and after it BlockingIOError.
    signal.signal(signal.SIGTERM, lambda *_: os.set_blocking(0, False))
    replace_attachment()
    present = state()
    os.write(1, json.dumps(present).encode() + b"\n")
    if present["end"] is not None or present["paused"]:
        return
    # Without waiting for the first process, which may have ended by now. It begins when its input is opened.
    stdout, stderr = (
        os.open(f"{FOLDER}/{name}", os.O_RDONLY | os.O_NONBLOCK) for name in ("stdout", "stderr")
    )
    stdin = os.open(f"{FOLDER}/stdin", os.O_RDWR)

    def carry_outputs():
        try:
            copy(stdout, 1)
            log.join()
        finally:
            os._exit(0)

    log = threading.Thread(target=copy, args=(stderr, 2), daemon=True)
    outputs = threading.Thread(target=carry_outputs)
    for descriptor in (stdout, stderr):
        os.set_blocking(descriptor, True)
    log.start()
    outputs.start()
    while True:
        try:
            copy(0, stdin)
            break
        except BlockingIOError:
            if not select.select([0], [], [], QUIET_SECONDS)[0]:
                break
    if survives == "1":
        os._exit(0)  # another attachment takes over
    os.close(stdin)


def replace_attachment():
    """Be the only attachment: the previous one passes on the input that it has received, and ends."""
    lock = os.open(f"{FOLDER}/attachment", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + HAND_OVER_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(os.pread(lock, 20, 0)), number)
            time.sleep(0.01)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def copy(source, target):
    while data := os.read(source, CHUNK):
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


# Archives


class Parts:
    """A file in parts, as `tarfile` writes it."""

    def __init__(self, prefix, limit):
        self.prefix = prefix
        self.limit = limit
        self.file = None
        self.total = 0
        self.number = 0

    def write(self, data):
        self.total += len(data)
        if self.total > self.limit:
            raise OverflowError("they have too many bytes")
        view = memoryview(data)
        while view:
            if self.file is None:
                self.file = open(f"{self.prefix}-{self.number:06}", "wb")
                self.number += 1
            space = PART_BYTES - self.file.tell()
            self.file.write(view[:space])
            view = view[space:]
            if self.file.tell() == PART_BYTES:
                self.close()
        return len(data)

    def close(self):
        if self.file is not None:
            self.file.close()
            self.file = None


def unpack(prefix, root):
    names = sorted(glob.glob(f"{prefix}-*"))
    if not names:
        print("{}")  # as it did before, and the answer was lost
        return
    # Imported here: most runs of this program need it not, and importing it takes as long as the rest.
    import subprocess

    os.makedirs(root, exist_ok=True)
    parts = subprocess.Popen(["cat", *names], stdout=subprocess.PIPE)
    give_up_privileges()
    unpack_archive(parts.stdout, root)
    for name in names:
        os.unlink(name)
    print("{}")


def pack(prefix, root, limit, max_entries, max_name_bytes):
    if os.path.exists(f"{prefix}-reply"):
        # The parts may be read by now, as the lock does not keep the order of repeated commands.
        with open(f"{prefix}-reply") as file:
            print(file.read())
        return
    parts = Parts(prefix, int(limit))
    answer = {}
    try:
        give_up_privileges()
        pack_archive(root, parts, int(max_entries), int(max_name_bytes))
    except OverflowError as error:
        answer = {"tooLarge": str(error)}
    parts.close()
    reply = json.dumps({**answer, "parts": parts.number})
    write_file(f"{prefix}-reply", reply)
    print(reply)


# The kernel


def give_up_privileges():
    drop_capabilities()
    libc_call("prctl", PR_CAP_AMBIENT, 4, 0, 0, 0)
    libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def out_of_memory_kills():
    try:
        with open("/proc/vmstat") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return 0


def write_file(path, text):
    with open(f"{path}.new", "w") as file:
        file.write(text)
    os.rename(f"{path}.new", path)


if __name__ == "__main__":
    functions = (start, attach, status, pause, unpack, pack)
    commands = {function.__name__: function for function in functions}
    command, *rest = sys.argv[1:]
    os.makedirs(FOLDER, 0o700, exist_ok=True)
    with open(f"{FOLDER}/lock", "w") as lock:
        if command not in ("attach", "status"):
            # A command whose answer was lost may still run.
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            commands[command](*rest)
        except OSError as error:
            if command != "unpack":
                raise
            print(json.dumps({"error": f"{error.filename or ''}: {error.strerror}".strip(": ")}))
