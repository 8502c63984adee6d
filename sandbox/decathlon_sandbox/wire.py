"""Wire protocol between the server and the driver: messages, limits, error codes and the bootstrap loader.

Transport --------- The server writes to the driver's stdin and reads its stdout; the driver's stderr is a
log. Messages are JSON-RPC 2.0 in UTF-8, without line feeds; `lines` describes the lines that carry them. A
message from the server has at most MAX_LINE_BYTES. A response has at most MAX_RESPONSE_BYTES, unless a `call`
allows more; a longer response is an error (code TOO_LONG). A notification has at most MAX_NOTIFICATION_BYTES;
longer notifications are dropped. So are notifications of the task's servers above NOTIFICATIONS_PER_SECOND,
after NOTIFICATIONS_BURST of them, and while there is little room for responses.

The stream may lose any bytes, may be cut inside a line, and may be opened again by the same server process or
by another. The server sends `attach` on every stream, and again on the same stream if a line was damaged or
no answer comes, and with it the ids of the requests that it waits for. The driver obeys the newest `attach`,
unless its generation is lower than the current one: a server process has a higher generation than all before
it, and a replaced process gets `refused`. The driver answers with `attached`, and with the ids that it has
never received, whose requests the server sends again. It sends the kept responses of the others, forgets
every other response, and cancels the other requests of this server process, as the server has done. So
requests and responses survive a stream. Nothing else does: notifications may be lost, and tunnels are reset.

The sandbox's first process runs `BOOT_COMMAND`. It reads one line with a decimal number of bytes, then that
many bytes: a dictionary, by `marshal`, that maps the names of this package's modules to their source code,
which it imports from memory. A further entry "NAME MAGIC" has the marshalled code object of a module, in
zlib, for a Python whose bytecode has that magic number (in hexadecimal): to compile the source would take
longer than anything else in the boot. The server does not wait for that: it sends `attach` after the source.
`attached` is the sign that the driver runs, and has its VERSION. A process that has not received the whole
source after LOADER_SECONDS ends.

Requests run concurrently and are answered in any order. An id is `generation << COUNTER_BITS | counter`: the
generation of the server process that sent the request first, and a number from 1 that this process has not
used before. A request with an id that was used before does not run again. Its response is still to come, or
is sent again, if the server has not named it in `done`; else the request is answered with an error (INVALID).
An id that was cancelled counts as used.

A request begins only if the responses that are kept leave room in RESPONSE_BUFFER_BYTES for its longest
response, in addition to the responses of all requests in progress. While much is kept or not written, the
driver does not read the output of the task's servers and of tunnels.

Requests: params -> result
--------------------------
`arrange`   {"steps": [STEP...]} -> {}
            Runs file operations in order and stops at the first that fails (code FILES). STEP is one of
              {"make": DIR}                  creates a folder and its parents; it may exist already
              {"copy": SRC, "to": DIR}       copies the contents of folder SRC into DIR, created if missing
              {"remove": PATH}               removes a file, link or tree; it may be missing
              {"write": PATH, "text": STR}   writes a file, with mode 0644
              {"absent": [NAME...], "under": DIR}
                                             fails if anything under DIR (links are not followed) has one of
                                             these names
              {"unpack": DIR, "tar": BASE64}
                                             unpacks an archive into DIR, created if missing. Existing files
                                             and links are replaced, a folder and a file never replace each
                                             other, and no link below DIR is followed. An archive that is not
                                             whole, or has anything but what follows, is an error (BAD_PARAMS)
                                             before anything of it is written
            An archive is a tar (ustar, with GNU's long names) of at most MAX_ARCHIVE_BYTES: files, folders,
            symlinks and hard links. Names are relative, without "." and "..", and so are the targets of hard
            links. Of modes, only permissions count, and owners do not.
`pack`      {"folder": DIR, "max_bytes": INT} -> {"tar": BASE64}
            An archive of the files, folders and symlinks below DIR; of none if it is no folder. Fails with
            TOO_LONG if it would be longer than `max_bytes`, and with FILES if there is anything else below
            DIR, or a file with several names.
`run`       {"argv": [STR...], "cwd": DIR, "env": {STR: STR}, "timeout_seconds": NUM, "output_bytes": INT,
             "channel": BOOL, "leave": BOOL?, "linger_seconds": NUM?}
            -> {"exit_code": INT | null, "signal": INT | null, "timed_out": BOOL, "stdout": STR,
                "stderr": STR, "channel": STR | null, "background": INT}
            Runs a command in its own session, with empty stdin and the driver's variables besides `env`. When
            it exits or times out, its whole process tree is killed, daemons included. The last `output_bytes`
            of stdout and of stderr are returned, as UTF-8 with invalid bytes replaced. With `channel`, the
            environment variable CHANNEL_VARIABLE has the number of an open socket; `channel` is what the
            command wrote to it (the first MiB). A program that does not exist is an error (code SPAWN). With
            `leave`, processes that the command started in the background and that still run when it exits
            are kept until `freeze` or until the driver exits. `background` is their number, counted after up
            to `linger_seconds` (default 0) in which they may end by themselves.
`snapshot`  {} -> {"since": SINCE}
            SINCE: {"moment_ns": INT, "offset_ns": INT}, a moment for `clean`.
`clean`     {"since": SINCE, "under": [DIR...] | null, "except": [PATH...]}
            -> {"removed": INT, "paths": [STR...], "count": INT}
            Finds what was created or changed since the snapshot, by the time of its inode: on every writable
            mount and among System V's IPC objects or, with `under`, below these folders only. Links are not
            followed. Nothing at or below the paths of `except` counts. Changed entries of scratch folders
            (TMPDIR and, without `under`, /tmp, /var/tmp, /dev/shm, /dev/mqueue, /run, /var/cache, /var/log,
            ~/.cache, ~/.npm), changed bytecode of Python and empty files named `.lock` are removed; `removed`
            is the number of files. All other changed files, links, empty folders and bound sockets stay:
            `count` is their number, `paths` the first 100. Other changed folders get the present time. Fails
            with FILES if the clock was set back meanwhile.
`merge`     {} -> {}
            Lets the kernel merge equal memory pages of the driver, and of what it starts from now on, with
            other sandboxes' pages, and fixes the addresses and the hash seed of the task's servers, so that
            their pages are equal; as far as the kernel and the sandbox allow it.
`define`    {"servers": [SERVER...]} -> {}
            Keeps the specifications of the task's MCP servers, so that they can be started by name, also by a
            server process that does not have them and their secrets. Starts nothing. A name that was defined
            before gets the new specification, which holds from its next start on.
            SERVER: {"name": STR, "command": STR, "args": [STR...], "env": {STR: STR},
                     "inherit": "minimal" | "all", "cwd": DIR, "request_seconds": NUM?}
            "minimal" passes what the MCP SDK's stdio client passes (HOME, LOGNAME, PATH, SHELL, TERM, USER),
            plus `env`. The program is looked up in the resulting PATH.
`start`     {"names": [NAME...], "deadline_seconds": NUM, "again": BOOL?} -> {"servers": {NAME: INFO}}
            Makes sure that these servers run. Servers that do not run are started, STARTS_AT_ONCE at a time,
            initialized, and asked for their tools (all pages); the result has only these servers. Each has
            `deadline_seconds` from its start on. A server that another request is starting is waited for. A
            server that ran and has ended fails the request (code SERVER, "ended": true in its data), unless
            `again` is true. INFO: {"tools": [RAW...]}
            A server that exits, answers with an error or is not initialized before the deadline fails the
            request (code SERVER) with data {"server": NAME, "stderr": STR (its end), "exit_code": INT | null
            (negative: the signal)}; all servers that the request was starting are then stopped, and another
            request can start them. A name that was not defined fails it (code BAD_PARAMS).
`call`      {"server": NAME, "params": {...}, "max_bytes": INT,
             "cut": {"folder": DIR?, "characters": INT}?}
            -> the task server's whole reply: {"jsonrpc": "2.0", "id": ..., "result" | "error": ...}
            Relays one `tools/call`, for at most the server's `request_seconds`. The bytes of the reply are
            unchanged, except that unpaired surrogates become U+FFFD. A reply of more than `max_bytes` is an
            error (TOO_LONG). With `cut`, a result whose text has more than that many characters is replaced
            by {"result": ...} with its beginning, and the response has a further member
            "overlong": {"path": PATH | null, "characters": INT}. With `folder`, it is the text that
            Toolathlon's model reads, and all of it is written to a new file there, PATH; without, it is the
            text of the content items, and what is cut off is dropped, as in toolathlon_gym.
            `progress` and `message` notifications may come before the reply. A progress token in `params` is
            replaced on the way.
            Codes: TIMEOUT (the task's server receives a cancellation), SERVER (it exited, or its reply is not
            valid JSON; data as for `start`), TOO_LONG, FILES (the whole text cannot be written).
`freeze`    {"spare": [PATTERN...]?} -> {"stderr": {NAME: STR...}}
            Kills every server and every other process of the sandbox except the driver. Permanent: `call` and
            `start` fail with FROZEN from then on, also in progress; `run` and `arrange` keep working.
            `stderr` has the end of what each server wrote there, if it wrote anything.
            Servers first have their stdin closed and get one second to exit, then SIGTERM and one more
            second, then SIGKILL. `spare` exempts processes that are running when the request arrives and
            whose command line (arguments joined by spaces, the first with or without its folder) matches a
            PATTERN (`*` matches anything); they live until the driver exits. Cannot be cancelled.
`forward`   {"ports": [INT...]} -> {}
            Listens on these TCP ports of the sandbox's loopback (127.0.0.1, and ::1 if it exists), unless it
            does so already. Every connection is announced by `opened` and tunnelled to the server. `freeze`
            kills the processes that are connected, but the listeners stay. Code NETWORK.
`dial`      {"port": INT, "conn": INT} -> {}
            Connects to a TCP port on the sandbox's 127.0.0.1 and tunnels the connection. `conn` is its
            number, chosen by the server: negative and never used before by this process. A `cancel` or a
            `reset` before the response ends it, and so does every attachment (code CANCELLED). Codes
            NETWORK, CANCELLED.
`resolve`   {} -> {}
            Answers DNS queries at port 53 (UDP) of 127.0.0.1, unless it does so already: every name has the
            address 127.0.0.1. Code NETWORK.
`ping`      {"saving": BOOL?} -> {}
            With `saving`, the sandbox is about to be saved: the clock of a copy shows all the time that has
            passed since then, in which no server could be heard, so that its lease begins again.

Tunnels
-------
Each tunnelled connection has a number that is not used again on the same stream. Both sides send
notifications about it:
`data` {"conn": INT, "data": BASE64}      at most CHUNK_BYTES
`taken` {"conn": INT, "bytes": INT}       flow control: this many received bytes were passed on. At most
                                          WINDOW_BYTES per direction may be unacknowledged
`finished` {"conn": INT}                  end of data in this direction
`reset` {"conn": INT}                     the connection is broken, or closed in both directions
A connection is closed when both sides have sent `finished` or one has sent `reset`. Notifications about a
closed connection are ignored. The server answers an `opened` that it does not accept with `reset`.

Other notifications
-------------------
Server to driver:
`cancel` {"id": INT}                      cancels a request. A `call` is also cancelled at the task's server
                                          (`notifications/cancelled`). The request fails with CANCELLED: a
                                          `run` or `start` once all of its work has stopped. `arrange`, `pack`
                                          and `clean` go on to their end
Driver to server:
`progress` {"id": INT, "params": {...}}   progress of the `call` with this id; params as the task's server
                                          sent them
`message` {"id": INT | null, "server": NAME, "params": {...}}
                                          log message of a task's server; id of the `call` if exactly one is
                                          running on that server
`opened` {"conn": INT, "port": INT}       a process in the sandbox connected to a forwarded port
`changed` {"server": NAME}                a server sent `notifications/tools/list_changed`

Lifetime
--------
Every valid line from the server renews the driver's lease: the `survive_seconds` of `attach`, or
LEASE_SECONDS if that is 0 or no server has attached yet. When it expires, the driver kills all processes that
it started and exits. With 0, the end of its stdin is the end too. Every process that it starts has
MARK_VARIABLE in its environment, which says with which call it ends.

With MEMORY_VARIABLE, the driver keeps the sandbox's memory below that many MiB (`memory.py`), and exits with
OUT_OF_MEMORY_EXIT where it cannot. With PRELOAD_VARIABLE, it has inherited a socket with that number, over
which servers start as forks (`preloaded.py`).
"""

import time

VERSION = 8
LEASE_SECONDS = 60.0
CHANNEL_VARIABLE = "DECATHLON_CHANNEL"
MARK_VARIABLE = "DECATHLON_MARK"
MEMORY_VARIABLE = "DECATHLON_MEMORY_MIB"
PRELOAD_VARIABLE = "DECATHLON_PRELOAD"
COUNTER_BITS = 32
"""At 10,000 requests a second, a server process uses all counters after five days."""
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_RESPONSE_BYTES = 4 * 1024 * 1024 + 64 * 1024
RESPONSE_MARGIN_BYTES = 64 * 1024
"""How much longer than the longest reply of a task's server the response to a `call` can be."""
REQUEST_BUFFER_BYTES = MAX_LINE_BYTES + 16 * 1024 * 1024
"""Requests of the server that have no response."""
RESPONSE_BUFFER_BYTES = 256 * 1024 * 1024
"""Responses that the server may need again: 59 calls at once whose replies have up to 4
MiB, or 3 with up to 60 MiB. Memory is only used for what was sent."""
MAX_ARCHIVE_BYTES = 2 * 1024 * 1024
"""In base64 less than MAX_RESPONSE_BYTES."""
MAX_NOTIFICATION_BYTES = 256 * 1024
NOTIFICATIONS_PER_SECOND = 100
NOTIFICATIONS_BURST = 1000
WINDOW_BYTES = 256 * 1024
CHUNK_BYTES = 48 * 1024
STARTS_AT_ONCE = 3
"""Servers of one `start` that start at the same time: on a busy machine, more only take each other's time."""

# methods
ARRANGE = "arrange"
PACK = "pack"
RUN = "run"
SNAPSHOT = "snapshot"
CLEAN = "clean"
MERGE = "merge"
DEFINE = "define"
START = "start"
CALL = "call"
FREEZE = "freeze"
FORWARD = "forward"
DIAL = "dial"
RESOLVE = "resolve"
PING = "ping"

# notifications
CANCEL = "cancel"
PROGRESS = "progress"
MESSAGE = "message"
CHANGED = "changed"
OPENED = "opened"
# about tunnels, in both directions
DATA = "data"
TAKEN = "taken"
FINISHED = "finished"
RESET = "reset"

# Closed table of error codes. A sandbox is not trusted, so the server maps codes through REASONS only and a
# driver can never produce one of the server's own error codes.
PARSE = -32700
INVALID = -32600
UNKNOWN_METHOD = -32601
BAD_PARAMS = -32602
INTERNAL = -32603
FILES = 1
SPAWN = 2
SERVER = 3
TIMEOUT = 4
CANCELLED = 5
FROZEN = 6
TOO_LONG = 7
NETWORK = 8
REASONS = {
    PARSE: "parse_error",
    INVALID: "invalid_request",
    UNKNOWN_METHOD: "unknown_method",
    BAD_PARAMS: "bad_params",
    INTERNAL: "driver_fault",
    FILES: "files",
    SPAWN: "spawn",
    SERVER: "server",
    TIMEOUT: "timeout",
    CANCELLED: "cancelled",
    FROZEN: "frozen",
    TOO_LONG: "too_long",
    NETWORK: "network",
}


class TokenBucket:
    """A rate with a burst: `per_second` units a second on average, and `burst` units at once."""

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._available = burst
        self._refilled_at = time.monotonic()

    def take(self, amount: float = 1.0) -> bool:
        """Take that many units if they are available, else none."""
        self._refill()
        if amount > self._available:
            return False
        self._available -= amount
        return True

    def spend(self, amount: float) -> float:
        """Take that many units in any case; returns the seconds to wait until none is owed."""
        self._refill()
        self._available -= amount
        return max(0.0, -self._available / self._per_second)

    def _refill(self) -> None:
        now = time.monotonic()
        refilled = self._available + (now - self._refilled_at) * self._per_second
        self._available, self._refilled_at = min(self._burst, refilled), now


# Program of the sandbox's first process. It imports what the driver needs of the standard library before it
# reads the sources, which arrive later than it starts. It reports a broken Python by an exit code, after it
# has read them, so that the server can write them all. It reads with `os.read`, because `sys.stdin.buffer`
# reads ahead and would swallow the first message. A server that dies meanwhile need not close its stdin,
# hence the alarm. It has a handler because the first process of a container ignores signals without one. The
# handler is removed before the agent's processes exist, which could otherwise end the driver by this signal.
# `_signal` is the part of `signal` that is built into the interpreter.
LOADER_SECONDS = 60
LOADER = """\
import os, sys, _signal
_signal.signal(_signal.SIGALRM, lambda *_: os._exit(0))
_signal.alarm(LOADER_SECONDS)
missing = None
try:
    import binascii, json, marshal, selectors, importlib.machinery
    from importlib._bootstrap_external import MAGIC_NUMBER
    import collections, heapq, itertools, math, re, select, signal, threading, time
    if not importlib.machinery.PathFinder.find_spec("subprocess"): raise ImportError("no subprocess")
except ImportError as error: missing = str(error)
try: import zlib
except ImportError: zlib = None
def read(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part: raise SystemExit(0)
        data += part
    return data
line = b""
while not line.endswith(b"\\n"): line += read(1)
sources = read(int(line))
_signal.alarm(0)
_signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
if missing is not None:
    sys.stderr.write("decathlon: this Python lacks its standard library: %s\\n" % missing)
    raise SystemExit(97)
if sys.version_info < (3, 10):
    sys.stderr.write("decathlon: Python 3.10 or later is needed, this is %s\\n" % sys.version.split()[0])
    raise SystemExit(98)
sources = marshal.loads(sources)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in sources:
            return importlib.machinery.ModuleSpec(name, self, origin=name, is_package="." not in name)
    def create_module(self, spec): return None
    def exec_module(self, module):
        name = module.__name__
        code = sources.get("%s %s" % (name, MAGIC_NUMBER.hex()))
        if code and zlib: code = marshal.loads(zlib.decompress(code))
        else: code = compile(sources[name], name, "exec")
        exec(code, module.__dict__)
    def get_source(self, name): return sources[name].decode()
sys.meta_path.insert(0, Finder())
from decathlon_sandbox.driver import main
raise SystemExit(main())
""".replace("LOADER_SECONDS", str(LOADER_SECONDS))
BOOT_COMMAND = ("python3", "-I", "-S", "-u", "-c", LOADER)
OUT_OF_MEMORY_EXIT = 96
