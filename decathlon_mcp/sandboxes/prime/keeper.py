"""Program in a Prime sandbox: runs the first process and keeps its stream while nobody is connected.

Sent to the sandbox as text: Python 3.10, standard library. Subcommands:

    serve FOLDER CONFIG     run the first process (in the background; prints `ready`)
    attach FOLDER           connect stdin and stdout of this process to the keeper
    call FOLDER REQUEST     one request, one line of JSON: `status`, `kill`
    unpack PREFIX ROOT      unpack PREFIX-* (a tar in parts) into ROOT
    pack PREFIX ROOT LIMIT  pack ROOT into PREFIX-* (a tar in parts)

A message is a letter, an offset (8 bytes), a length (4 bytes) and a payload. To the keeper: `A` attach (the
offset that the server has), `D` stdin, `E` its end, `K` what the server has. From it: `A` (the offset of the
stdin that has arrived), `O` stdout, `L` stderr, `X` the end as JSON, `K`. Offsets count the bytes of payload
in each direction (`X` and `E` count as one), so that each side sends again what the other has not received.

The first process is the first of a PID namespace: it cannot be killed from inside, and with it, everything
inside ends. It has no capabilities, and a /tmp and a /proc of its own.
"""

import ctypes
import errno
import glob
import json
import os
import selectors
import signal
import socket
import struct
import sys
import tarfile
import time

HEADER = struct.Struct(">cQI")
UNKNOWN = (1 << 64) - 1
KEPT_BYTES = 1 << 20
PART_BYTES = 8 << 20
CHUNK = 1 << 16
NEWNS, NEWIPC, NEWPID = 0x20000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC_PRIVATE = 2, 4, 8, 0x4000 | 0x40000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 24, 38, 47
CAPSET = {"x86_64": 126, "aarch64": 91}


def libc_call(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def drop_capabilities():
    for capability in range(64):
        try:
            libc_call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            break
    libc_call("prctl", PR_CAP_AMBIENT, 4, 0, 0, 0)
    libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    number = CAPSET[os.uname().machine]
    if ctypes.CDLL(None, use_errno=True).syscall(number, header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def run_first_process(config, pipes):
    """In the new process. Never returns."""
    try:
        os.setsid()
        libc_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc_call("unshare", NEWNS | NEWIPC)
        libc_call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
        libc_call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        size = b"mode=1777,size=%dm" % config["scratch_mib"]
        libc_call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, size)
        for number, descriptor in enumerate(pipes):
            os.dup2(descriptor, number)
        os.closerange(3, 4096)
        os.chdir(config["root"])
        drop_capabilities()
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        os.execvp(config["command"][0], config["command"])
    except OSError as error:
        os.write(2, f"decathlon: cannot start: {error}\n".encode())
        os._exit(127 if error.errno == errno.ENOENT else 126)


def out_of_memory_kills():
    try:
        with open("/proc/vmstat") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return 0


class Keeper:
    def __init__(self, folder, config):
        self.config = config
        self.selector = selectors.DefaultSelector()
        self.connection = None
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self.kept = []
        self.kept_bytes = 0
        self.sent_offset = 0
        self.stdin_offset = 0
        self.stdin = bytearray()
        self.stdin_ends = False
        self.exit = None
        self.killed = False
        self.heard = time.monotonic()
        self.oom_kills = out_of_memory_kills()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{folder}/socket")
        self.listener.listen(16)
        self.listener.setblocking(False)
        self.start()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def start(self):
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        # From here on, the next process is the first of a new PID namespace; the keeper makes no other.
        libc_call("unshare", NEWPID)
        self.pid = os.fork()
        if self.pid == 0:
            run_first_process(self.config, (stdin[0], stdout[1], stderr[1]))
        for descriptor in (stdin[0], stdout[1], stderr[1]):
            os.close(descriptor)
        self.stdin_fd, self.outputs = stdin[1], {stdout[0]: b"O", stderr[0]: b"L"}
        os.set_blocking(self.stdin_fd, False)
        self.pidfd = os.pidfd_open(self.pid)
        self.selector.register(self.pidfd, selectors.EVENT_READ, self.reap)
        for descriptor in self.outputs:
            os.set_blocking(descriptor, False)
        self.reading = False
        self.update()

    def update(self):
        """Read the outputs while there is space; write to stdin and to the connection while there is data."""
        reading = self.exit is None and self.kept_bytes < KEPT_BYTES
        if reading != self.reading:
            self.reading = reading
            for descriptor in self.outputs:
                if reading:
                    self.selector.register(descriptor, selectors.EVENT_READ, self.read)
                else:
                    self.selector.unregister(descriptor)
        self.watch(self.stdin_fd, bool(self.stdin), self.write_stdin)
        if self.stdin_ends and not self.stdin and self.stdin_fd is not None:
            self.close_stdin()
        if self.connection is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
            self.selector.modify(self.connection, events, self.serve)

    def watch(self, descriptor, wanted, handler):
        if descriptor is None:
            return
        known = descriptor in self.selector.get_map()
        if wanted and not known:
            self.selector.register(descriptor, selectors.EVENT_WRITE, handler)
        elif known and not wanted:
            self.selector.unregister(descriptor)

    def close_stdin(self):
        self.watch(self.stdin_fd, False, None)
        os.close(self.stdin_fd)
        self.stdin_fd = None
        self.stdin.clear()

    def write_stdin(self, _fd, _events):
        try:
            del self.stdin[: os.write(self.stdin_fd, self.stdin)]
            self.acknowledge_input()
        except BlockingIOError:
            pass
        except OSError:
            self.close_stdin()

    def read(self, descriptor, _events):
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return
        if data:
            self.emit(self.outputs[descriptor], data)
        else:
            self.selector.unregister(descriptor)
            del self.outputs[descriptor]
            os.close(descriptor)

    def reap(self, descriptor, _events):
        self.selector.unregister(descriptor)
        _, status = os.waitpid(self.pid, 0)
        for output, kind in self.outputs.items():
            while True:
                try:
                    data = os.read(output, CHUNK)
                except BlockingIOError:
                    break
                if not data:
                    break
                self.emit(kind, data)
        code = os.waitstatus_to_exitcode(status)
        oom = code == -signal.SIGKILL and out_of_memory_kills() > self.oom_kills
        self.exit = {"code": code if code >= 0 else 128 - code, "oom": oom}
        if self.reading:
            self.reading = False
            for output in self.outputs:
                self.selector.unregister(output)
        if not self.killed:
            self.emit(b"X", json.dumps(self.exit).encode())

    def emit(self, kind, payload):
        size = 1 if kind == b"X" else len(payload)
        message = HEADER.pack(kind, self.sent_offset, len(payload)) + payload
        self.kept.append((self.sent_offset, size, message))
        self.kept_bytes += size
        self.sent_offset += size
        if self.connection is not None:
            self.outgoing += message

    def accept(self, _fd, _events):
        accepted, _ = self.listener.accept()
        # Both programs send the first byte at once.
        accepted.settimeout(5)
        try:
            if accepted.recv(1) == b"R":
                request = json.loads(accepted.makefile("rb").readline(1 << 16))
                accepted.sendall(json.dumps(self.answer(request)).encode() + b"\n")
                accepted.close()
                return
        except (OSError, ValueError):
            accepted.close()
            return
        accepted.setblocking(False)
        self.disconnect()
        self.connection = accepted
        self.selector.register(accepted, selectors.EVENT_READ, self.serve)

    def answer(self, request):
        if request.get("do") == "kill":
            self.killed = True
            if self.exit is None:
                os.kill(self.pid, signal.SIGKILL)
        return {"exit": self.exit, "killed": self.killed}

    def disconnect(self):
        if self.connection is not None:
            self.selector.unregister(self.connection)
            self.connection.close()
            self.connection = None
        self.incoming.clear()
        self.outgoing.clear()

    def serve(self, _fd, events):
        try:
            if events & selectors.EVENT_WRITE and self.outgoing:
                del self.outgoing[: self.connection.send(memoryview(self.outgoing)[:CHUNK])]
            if events & selectors.EVENT_READ:
                data = self.connection.recv(CHUNK)
                if not data:
                    self.disconnect()
                    return
                self.heard = time.monotonic()
                self.incoming += data
                self.handle()
        except BlockingIOError:
            pass
        except OSError:
            self.disconnect()

    def handle(self):
        while len(self.incoming) >= HEADER.size:
            kind, offset, length = HEADER.unpack_from(self.incoming)
            if length > 4 * KEPT_BYTES or kind not in b"ADEK":
                self.disconnect()
                return
            if len(self.incoming) < HEADER.size + length:
                return
            payload = bytes(self.incoming[HEADER.size : HEADER.size + length])
            del self.incoming[: HEADER.size + length]
            if kind in b"AK":
                self.acknowledged(offset)
            if kind == b"A":
                self.outgoing += HEADER.pack(b"A", self.stdin_offset, 0)
                for _, _, message in self.kept:
                    self.outgoing += message
            elif kind == b"D" and offset <= self.stdin_offset < offset + length:
                if self.stdin_fd is not None:
                    self.stdin += payload[self.stdin_offset - offset :]
                self.stdin_offset = offset + length
            elif kind == b"E" and offset == self.stdin_offset:
                self.stdin_offset += 1
                self.stdin_ends = True
            if kind in b"DE":
                self.acknowledge_input()

    def acknowledge_input(self):
        if self.connection is not None:
            self.outgoing += HEADER.pack(b"K", self.stdin_offset - len(self.stdin), 0)

    def acknowledged(self, offset):
        while self.kept and offset != UNKNOWN and self.kept[0][0] + self.kept[0][1] <= offset:
            self.kept_bytes -= self.kept.pop(0)[1]

    def run(self):
        while True:
            self.update()
            for key, events in self.selector.select(10):
                if key.fileobj in self.selector.get_map():
                    key.data(key.fd, events)
            silent = time.monotonic() - self.heard
            if not self.config["survives"] and silent > self.config["silent_seconds"]:
                self.stdin_ends = True


def serve(folder, config):
    config = json.loads(config)
    os.makedirs(config["root"], exist_ok=True)
    report, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            keeper = Keeper(folder, config)
        except BaseException as error:
            os.write(done, f"{type(error).__name__}: {error}".encode()[:1000])
            os._exit(1)
        os.write(done, b"ready")
        os.close(done)
        os.close(report)
        for number in range(3):
            os.dup2(null, number)
        keeper.run()
    os.close(done)
    print(os.read(report, 2000).decode(), flush=True)


def attach(folder):
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"{folder}/socket")
    peer.sendall(b"S")
    poll = selectors.DefaultSelector()
    poll.register(0, selectors.EVENT_READ)
    poll.register(peer, selectors.EVENT_READ)
    while True:
        for key, _ in poll.select():
            if key.fd == 0:
                data = os.read(0, CHUNK)
                peer.sendall(data)
            else:
                data = peer.recv(CHUNK)
                view = memoryview(data)
                while view:
                    view = view[os.write(1, view) :]
            if not data:
                return


def call(folder, request):
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    peer.connect(f"{folder}/socket")
    peer.sendall(b"R" + request.encode() + b"\n")
    print(peer.makefile("r").readline(), end="")


class Parts:
    """A file in parts, as `tarfile` reads and writes it."""

    def __init__(self, prefix, limit=0):
        self.prefix = prefix
        self.limit = limit
        self.names = sorted(glob.glob(f"{prefix}-*"))
        self.file = None
        self.total = 0
        self.number = 0

    def read(self, size):
        data = b""
        while len(data) < size:
            if self.file is None:
                if not self.names:
                    break
                self.file = open(self.names.pop(0), "rb")
            chunk = self.file.read(size - len(data))
            if not chunk:
                self.file.close()
                self.file = None
            data += chunk
        return data

    def write(self, data):
        self.total += len(data)
        if self.total > self.limit:
            raise OverflowError
        view = memoryview(data)
        while view:
            if self.file is None:
                self.file = open(f"{self.prefix}-{self.number:06}", "wb")
                self.number += 1
            space = PART_BYTES - self.file.tell()
            self.file.write(view[:space])
            view = view[space:]
            if self.file.tell() == PART_BYTES:
                self.file.close()
                self.file = None
        return len(data)


def enter(top, parts):
    """A descriptor of a folder below `top`, created where it is missing; follows no links."""
    descriptor = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            os.mkdir(part, 0o755, dir_fd=descriptor)
        except FileExistsError:
            pass
        try:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = child
    return descriptor


def unpack(prefix, root):
    os.makedirs(root, exist_ok=True)
    drop_capabilities()
    with tarfile.open(fileobj=Parts(prefix), mode="r|") as archive:
        for member in archive:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if member.isdir():
                descriptor = enter(root, parts)
                os.fchmod(descriptor, member.mode & 0o7777)
                os.utime(descriptor, (member.mtime, member.mtime))
                os.close(descriptor)
                continue
            parent = enter(root, parts[:-1])
            try:
                unpack_member(archive, member, root, parts[-1], parent)
            finally:
                os.close(parent)
    print("{}")


def unpack_member(archive, member, root, name, parent):
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=parent)
    elif member.islnk():
        target = [part for part in member.linkname.split("/") if part not in ("", ".")]
        source = enter(root, target[:-1])
        try:
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        body = archive.extractfile(member)
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            while data := body.read(CHUNK):
                file.write(data)
            os.fchmod(file.fileno(), member.mode & 0o7777)
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent)


def pack(prefix, root, limit):
    parts = Parts(prefix, int(limit))
    archive = tarfile.open(fileobj=parts, mode="w|", format=tarfile.PAX_FORMAT)
    answer = {}
    try:
        if os.path.isdir(root):
            drop_capabilities()
            for top, folders, files in os.walk(root):
                relative = os.path.relpath(top, root)
                here = "." if relative == "." else f"./{relative}"
                links = [name for name in folders if os.path.islink(f"{top}/{name}")]
                pack_member(archive, top, here)
                for name in sorted(files + links):
                    pack_member(archive, f"{top}/{name}", f"{here}/{name}")
        archive.close()
    except OverflowError:
        answer = {"tooLarge": True}
    if parts.file is not None:
        parts.file.close()
    print(json.dumps({**answer, "parts": parts.number}))


def pack_member(archive, path, name):
    try:
        member = archive.gettarinfo(path, name)
        if member is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return
        if member.isreg():
            with open(path, "rb") as file:
                # It may have become shorter or longer meanwhile.
                member.size = os.fstat(file.fileno()).st_size
                archive.addfile(member, Padded(file, member.size))
            return
    except OSError:
        return
    archive.addfile(member)


class Padded:
    """Exactly `size` bytes of a file, with zeros after its end."""

    def __init__(self, file, size):
        self.file, self.remaining = file, size

    def read(self, size):
        size = min(size, self.remaining)
        data = self.file.read(size)
        self.remaining -= size
        return data + bytes(size - len(data))


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    try:
        {"serve": serve, "attach": attach, "call": call, "unpack": unpack, "pack": pack}[command](*rest)
    except OSError as error:
        if command != "unpack":
            raise
        print(json.dumps({"error": f"{error.filename or ''}: {error.strerror}".strip(": ")}))
