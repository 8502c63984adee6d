"""Imports libraries once, so that Python servers can start as forks of its process, inside their sandboxes.

It is `sitecustomize` of a Python that is started with a server's own command line, up to the arguments of the
server's program: the last thing that an interpreter imports before it runs that program. It imports
libraries, and then waits here. A fork enters its sandbox and returns, and the interpreter runs the server as
it always would: `sys.argv`, `__main__`, tracebacks and flags are the interpreter's own work.

This process is outside of all sandboxes, runs as their user on this machine, and sees nothing of any: its
environment has only what is the same for all servers of this kind. Of a sandbox it gets descriptors, and
never reads what was sent to the fork. The fork is a member of the sandbox, with its limits and filters and
without any privilege, before a process of the sandbox can see it. Only then it reads its arguments and
environment, and it cannot be traced until everything that it has of this process, but memory, is closed.

`CONFIG` is set before this code is run. Standard library only, CPython 3.10 or later, Linux.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    CONFIG: dict[str, Any] = {}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 15, 22, 24
PR_SET_MM, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 35, 38, 47, 4
PR_SET_MM_MAP, PR_SET_MEMORY_MERGE = 14, 67
ADDR_NO_RANDOMIZE = 0x0040000
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
LIMITS = 16
"""Kinds of limits of a process, RLIM_NLIMITS."""
MAX_PAYLOAD_BYTES = 1 << 16
MAX_DESCRIPTORS = 16
REPORT_DESCRIPTOR = 500
"""First number for the descriptor of a fork that reports its imports, far from a server's descriptors."""
REAP_SECONDS = 0.2
"""How often ended forks are looked for; until then, each keeps an entry in the table of processes."""
STARTED, COLD = b"started", b"cold "
"""How messages begin that a fork sends to the driver: its pid follows, or the reason that it gives up."""


def run(config: dict[str, Any]) -> None:
    """Import, and wait for requests. Returns in forks only, as the beginning of a server."""
    import _socket

    checks = __import__("inside_checks") if config["checks"] else None
    sys.path.remove(config["path"])
    sys.path_importer_cache.pop(config["path"], None)
    os.close(int(config["path"].rpartition("/")[2]))
    control = _socket.socket(fileno=config["control"])
    os.set_inheritable(config["control"], False)
    own_environment = dict(os.environb)
    reset_signals()
    import_customization()
    if checks is not None:
        checks.check(control, config["libraries"], imported, problem_of_process)
    libc = harden(config["parent"])
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    failures = [name for name in config["libraries"] if not imported(name)]
    problem = problem_of_process({0, 1, 2, config["control"], config["report"]})
    sys.dont_write_bytecode = written
    if failures or problem:
        control.send(f"failed {problem or failures[0] + ' cannot be imported'}".encode())
        os._exit(1)
    forget_other_folders()
    loaded = {name.partition(".")[0] for name in sys.modules}
    import gc

    gc.collect()
    gc.freeze()
    fork = Fork(libc, config, own_environment, loaded)
    control.send(b"ready")
    serve(control, fork)


def reset_signals() -> None:
    """Handle signals as a server does, although this server may have been started with some ignored."""
    # The built-in module, with numbers for its enumerations.
    import _signal

    for number in range(1, _signal.NSIG):
        if number not in (_signal.SIGPIPE, _signal.SIGXFSZ) and _signal.getsignal(number) == _signal.SIG_IGN:
            is_interrupt = number == _signal.SIGINT
            _signal.signal(number, _signal.default_int_handler if is_interrupt else _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def import_customization() -> None:
    """Run the real `sitecustomize`, if this Python has one, before anything else, as without this program."""
    # Not `importlib.util`, which a server need not import.
    spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["_frozen_importlib"].module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def harden(parent: int) -> Any:
    """Let no other process look into this process and its forks, and end it with the server."""
    import ctypes

    try:
        with open("/proc/self/oom_score_adj", "rb+", buffering=0) as file:
            if int(file.read()) < 0:
                file.seek(0)
                file.write(b"0")
    except (OSError, ValueError):
        pass
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.umask(0o022)
    return libc


def imported(name: str) -> bool:
    """Import a module; whether that was possible, or is impossible for a server too."""
    try:
        __import__(name)
    except ImportError:
        pass
    except Exception:
        return False
    return True


def problem_of_process(descriptors: set[int]) -> str | None:
    """What libraries have done that a fork would not have, or would share; None if nothing."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "starts threads"
    open_ones = {int(name) for name in os.listdir("/proc/self/fd")}
    # The descriptor of the list itself is closed by now.
    if any(os.path.lexists(f"/proc/self/fd/{number}") for number in open_ones - descriptors):
        return "opens descriptors"
    return None


def forget_other_folders() -> None:
    """Forget what was listed in folders of the path that need not have the same content in a sandbox."""
    kept = tuple(f"{folder}/" for folder in (sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr"))
    for path in [path for path in sys.path_importer_cache if not f"{path}/".startswith(kept)]:
        del sys.path_importer_cache[path]


def serve(control: Any, fork: Fork) -> None:
    """Fork for each message of the server until it is gone. Returns in forks only."""
    import select

    poll = select.poll()
    poll.register(control.fileno(), select.POLLIN)
    living = 0
    while True:
        while living and reap():
            living -= 1
        if not poll.poll(REAP_SECONDS * 1000 if living else None):
            continue
        message, descriptors = receive(control, 256)
        if not message:
            os._exit(0)
        try:
            pid = os.fork()
        except OSError:
            pid = -1  # its driver sees the channel end
        if pid == 0:
            control.close()
            fork.become_server(message, descriptors)
            return
        living += pid > 0
        # The channel first: the server closes it once the third is closed. The last one may have to wait.
        for descriptor in descriptors:
            os.close(descriptor)


def reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def receive(source: Any, size: int) -> tuple[bytes, list[int]]:
    """A message, and the descriptors that came with it."""
    import _socket

    message, ancillary, _, _ = source.recvmsg(
        size, _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [
        int.from_bytes(data[at : at + 4], sys.byteorder)
        for level, kind, data in ancillary
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS
        for at in range(0, len(data) - 3, 4)
    ]
    return message, descriptors


class ColdError(Exception):
    """The server has to be started in the other way; the argument says why."""


class Fork:
    """Makes a server of a fork."""

    def __init__(
        self, libc: Any, config: dict[str, Any], environment: dict[bytes, bytes], loaded: set[str]
    ) -> None:
        self.libc = libc
        self.filters: tuple[list[bytes], list[bytes]] = config["filters"], config["merged filters"]
        self.report: int = config["report"]
        self.reads = {*map(os.fsencode, config["reads"])}
        self.given = {*map(os.fsencode, config["variables"])}
        # What the interpreter has set itself: LC_CTYPE, by which it coerces the C locale.
        self.environment = environment
        self.loaded = loaded
        self.identity = identity()
        self.folders = {path for path in sys.path if os.path.exists(path)}

    def become_server(self, message: bytes, descriptors: list[int]) -> None:
        """Enter the sandbox, and return in a process there that is ready to run the server."""
        import _socket

        # So that a copy of a traceback in the sandbox never lists what was here.
        channel = _socket.socket(fileno=descriptors[0])
        os.close(descriptors[2])
        try:
            self.enter(descriptors[1], descriptors[3:], *map(int, message.split()))
        except BaseException as error:
            give_up(channel, f"the sandbox could not be entered: {error}")
        first = fork_or_end(channel)
        if first:
            os.waitpid(first, 0)
            os._exit(0)
        # From here on, processes of the sandbox can see it.
        if fork_or_end(channel):
            os._exit(0)
        try:
            self.prepare(channel)
        except ColdError as error:
            give_up(channel, str(error))
        except BaseException as error:
            give_up(channel, f"{type(error).__name__}: {error}")

    def enter(self, process: int, groups: list[int], flags: int, leader: int, merges: int) -> None:
        """Join control groups and namespaces, and give up privileges. Nothing inside can see this yet.

        `merges`: whether the kernel may merge pages of the sandbox's processes, as the driver does it.
        """
        import ctypes

        for group in groups:
            os.write(group, b"0")
            os.close(group)
        libc, limit = self.libc, (ctypes.c_uint64 * 2)()
        for kind in range(LIMITS):
            if libc.prlimit(leader, kind, None, limit) == 0:
                libc.prlimit(0, kind, limit, None)
        if merges:
            libc.prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0)
            libc.personality(ADDR_NO_RANDOMIZE)
        self.checked(libc.setns(process, flags))
        os.close(process)
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        number = 0
        while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
            number += 1
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        self.checked(libc.capset(header, none))
        self.checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        for program in self.filters[merges]:
            code = ctypes.create_string_buffer(program, len(program))
            count = len(program) // 8
            pointer = (ctypes.c_uint64 * 2)(count, ctypes.addressof(code))
            self.checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, pointer, 0, 0))
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
            raise OSError("it could not be protected")

    def checked(self, result: int) -> None:
        if result != 0:
            import ctypes

            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def prepare(self, channel: Any) -> None:
        """Wait until the driver is the parent and knows this process, and be what a new process is."""
        payload, streams = receive(channel, MAX_PAYLOAD_BYTES)
        command, cwd, environment = decode(payload)
        if len(streams) != 3:
            raise ColdError("the request has no streams")
        replaced: list[str] = CONFIG["replaced"]
        if command[: len(replaced)] != replaced:
            raise ColdError("it has another command line")
        arguments = command[len(replaced) :]
        self.check(cwd, environment)
        os.setsid()
        import time

        # Until the process between is gone, and the sandbox's first process is the parent.
        while os.getppid() != 1:
            time.sleep(0.0005)
        channel.send(STARTED + b" %d" % os.getpid())
        # It is not let go if the driver has given up waiting.
        if channel.recv(1) != b"1":
            os._exit(1)
        channel.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        first_free = 3
        if self.report >= 0:
            report_imports(self.report)
            first_free = REPORT_DESCRIPTOR + 1
            os.closerange(3, REPORT_DESCRIPTOR)
        os.closerange(first_free, 1 << 20)
        os.chdir(cwd)
        refresh()
        # An installation for developers may name folders that the sandbox does not have.
        sys.path[:] = [path for path in sys.path if path not in self.folders or os.path.exists(path)]
        sys.orig_argv += arguments
        sys.argv += arguments
        self.set_environment(environment)
        show_command(self.libc, [*map(os.fsencode, sys.orig_argv)], environment)
        # The name that the kernel gives to a process of this program.
        self.libc.prctl(PR_SET_NAME, os.path.basename(os.fsencode(CONFIG["program"]))[:15], 0, 0, 0)
        # Last: from here on, processes of the sandbox may trace it, as every other server.
        self.libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)

    def check(self, cwd: bytes, environment: dict[bytes, bytes]) -> None:
        """Raises ColdError if a server started by itself could differ."""
        for name in {*environment, *self.given}:
            text = os.fsdecode(name)
            prefixes, names = CONFIG["compared"]
            read = name in self.reads or text.startswith(prefixes) or text in names
            if read and environment.get(name) != (self.environment.get(name) if name in self.given else None):
                raise ColdError(f"the variable {text} has another value")
        if self.identity != identity():
            raise ColdError("the sandbox has other files")
        folder = sys.modules["site"].USER_SITE if sys.modules["site"].ENABLE_USER_SITE else None
        if folder and os.path.exists(folder):
            raise ColdError("the sandbox's user has packages")
        if not os.access(cwd, os.X_OK):
            raise ColdError("the working folder cannot be entered")
        first = self.first_folder(cwd)
        if first is not None:
            try:
                names = modules_in(os.fsdecode(first))
            except OSError:
                names = set[str]()
            if shadowed := sorted(names & self.loaded):
                raise ColdError(f"there is another {shadowed[0]} in the program's folder")

    @staticmethod
    def first_folder(cwd: bytes) -> bytes | None:
        """The folder that the interpreter puts before its path: the program's, or the working folder."""
        if getattr(sys.flags, "safe_path", False):
            return None
        if CONFIG["script"]:
            return os.path.dirname(os.path.realpath(os.fsencode(CONFIG["script"])))
        return cwd

    def set_environment(self, environment: dict[bytes, bytes]) -> None:
        others = {*self.given, *environment, b"PYTHONPATH"}
        coerced = {name: value for name, value in self.environment.items() if name not in others}
        os.environ.clear()
        os.environb.update({**environment, **coerced})


def modules_in(folder: str) -> set[str]:
    """What could be imported from a folder. Programs without a suffix could not."""
    loaders = sys.modules["_frozen_importlib_external"]._get_supported_file_loaders()
    endings = tuple(ending for _, each in loaders for ending in each)
    with os.scandir(folder) as entries:
        return {
            entry.name.partition(".")[0]
            for entry in entries
            if entry.name.endswith(endings) or ("." not in entry.name and entry.is_dir())
        }


def refresh() -> None:
    """Do again what libraries have done when they were imported, where the result is another."""
    rich: Any = sys.modules.get("rich")
    if rich is not None and hasattr(rich, "_IMPORT_CWD"):
        rich._IMPORT_CWD = os.getcwd()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))


def identity() -> tuple[tuple[int, int, int], ...]:
    """Says which files the interpreter and its path are, and whether packages were installed since."""
    found: list[tuple[int, int, int]] = []
    for path in (sys.executable, os.__file__, *sys.path):
        try:
            status = os.stat(path)
        except OSError:
            continue
        if path.startswith(("/usr", sys.prefix, sys.base_prefix)):
            found.append((status.st_dev, status.st_ino, status.st_mtime_ns))
    return tuple(found)


def give_up(channel: Any, reason: str) -> NoReturn:
    try:
        channel.send(COLD + reason[:500].encode("utf-8", "replace"))
    finally:
        os._exit(1)


def fork_or_end(channel: Any) -> int:
    try:
        return os.fork()
    except OSError as error:
        give_up(channel, f"no process: {error}")


def decode(payload: bytes) -> tuple[list[str], bytes, dict[bytes, bytes]]:
    """Command line, working folder and environment: see `decathlon_sandbox.preloaded`."""
    count, cwd, *texts = payload.split(b"\0")
    command, variables = texts[: int(count)], texts[int(count) :]
    pairs = (variable.partition(b"=") for variable in variables)
    return [*map(os.fsdecode, command)], cwd, {name: value for name, _, value in pairs}


def report_imports(report: int) -> None:
    """Write the name of every module that is imported to a pipe, as long as somebody reads it."""
    import fcntl

    target = [fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, REPORT_DESCRIPTOR)]
    owner = os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and target and os.getpid() == owner:
            try:
                os.write(target[0], f"{arguments[0]}\n".encode())
            except OSError:
                os.close(target.pop())

    sys.addaudithook(hook)


def show_command(libc: Any, command: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Let /proc show the server's command line and environment, as after execve(2)."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    code, stack, data = [*map(int, fields[23:25])], int(fields[25]), [*map(int, fields[42:45])]
    arguments = b"".join(each + b"\0" for each in command)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in environment.items())
    size = len(arguments) + len(variables)
    # Readable, writable, private, anonymous; it stays as long as the process.
    libc.mmap.restype = libc.sbrk.restype = ctypes.c_uint64
    start = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
    ctypes.memmove(start, arguments + variables, size)
    middle, end = start + len(arguments), start + size
    numbers = [*code, *data, libc.sbrk(0), stack, start, middle, middle, end, 0]
    struct = b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)
    struct += (0).to_bytes(4, sys.byteorder) + b"\xff\xff\xff\xff"
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, struct, len(struct), 0)


if __name__ == "sitecustomize":
    try:
        run(CONFIG)
    except BaseException:
        # The interpreter would go on, and run the server's program here, outside of all sandboxes.
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    if "sitecustomize" in sys.modules and sys.modules["sitecustomize"].__dict__.get("CONFIG") is CONFIG:
        # As if there were none.
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
