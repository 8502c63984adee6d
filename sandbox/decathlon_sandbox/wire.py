"""The words that the driver and the server's link share. Nothing else is shared between the two.

The line is JSON-RPC 2.0, UTF-8, one message a line, `\\n` at its end: the server's end is the driver's
stdin, the driver's end its stdout; the driver's stderr is its log. It begins with the boot: the driver's
first process runs `BOOT_COMMAND`, reads one line with a decimal number of bytes, then that many bytes: a
JSON object that maps the names of this package's modules to their sources. It imports them from memory
and says `READY`. From then on, requests (server to driver, ids are positive integers never used twice)
run side by side and are answered in any order.

Requests, their params, their results:

`arrange`   {"steps": [STEP...]} -> {}. Steps run in order; the first that fails ends it (code FILES).
            STEP is one of
              {"make": DIR}                  with its parents; an existing folder is fine
              {"copy": SRC, "to": DIR}       what is in folder SRC goes into DIR (made if missing)
              {"remove": PATH}               file, link or tree; what is not there is fine
              {"write": PATH, "text": STR, "mode": INT?}
              {"absent": [NAME...], "under": DIR, "except": [DIR...]}
                                             fails if anything below DIR (links not followed) has one of
                                             these names, or lies at one of these absolute paths
`run`       {"argv": [STR...], "cwd": DIR, "env": {STR: STR}, "inherit": "all" | "minimal",
             "timeout_seconds": NUM, "output_bytes": INT, "channel": BOOL, "leave": BOOL?}
            -> {"exit_code": INT | null, "signal": INT | null, "timed_out": BOOL, "stdout": STR,
                "stderr": STR, "truncated": BOOL, "channel": STR | null, "seconds": NUM}
            Runs a process that ends, in a session of its own; when it ends or its time is over, its whole
            tree is killed, daemons included. stdin is empty. Of stdout and stderr the last `output_bytes`
            (at most 4 MiB) each are kept (UTF-8, bad bytes replaced). With `channel` the process is given a
            pipe whose write end's number is in the environment variable CHANNEL_VARIABLE; what it wrote there
            (the first MiB) is `channel`. `truncated`: there was more of any of the three. A program that is
            not there is an error (code SPAWN). With `leave` what the process leaves running when it ends by
            itself is let live, whatever else ends, until `freeze` or the driver's end.
`start`     {"servers": [SERVER...], "deadline_seconds": NUM} -> {"servers": {NAME: FACTS}}
            Starts the task's MCP servers side by side, shakes hands and lists their tools (all pages).
            SERVER: {"name": STR, "type": "stdio", "command": STR, "args": [STR...], "env": {STR: STR},
                     "inherit": "minimal" | "all", "cwd": DIR, "path": STR?, "request_seconds": NUM?}
                 or {"name": STR, "type": "sse" | "streamable_http", "url": STR, "headers": {STR: STR},
                     "request_seconds": NUM?}
            FACTS: {"protocolVersion": STR, "serverInfo": {...}, "capabilities": {...}, "tools": [RAW...],
                    "seconds": NUM}
            "minimal" is what the MCP SDK's stdio client hands a server: HOME, LOGNAME, PATH, SHELL, TERM,
            USER, then `env`; `path` takes the place of the inherited PATH (not of one in `env`). The program
            is looked up in the PATH that the server gets. One that ends, answers with an error or is silent
            until the deadline fails the request (code SERVER) with data {"server": NAME, "stderr": STR (last
            lines), "exit_code": INT | null (negative: the signal that ended it)}; the servers that did come
            up are then stopped. May be used again, for names that are not up.
`call`      {"server": NAME, "method": STR, "params": {...}, "timeout_seconds": NUM | null}
            -> the task server's whole reply, as it came: {"jsonrpc": "2.0", "id": ..., "result" | "error":
            ...} (the bytes of its line are embedded, not written anew; only half surrogate pairs in it become
            U+FFFD). `method` is `tools/call` or `tools/list`. `timeout_seconds` null: the server's
            `request_seconds`. While it runs, `progress` and `message` notifications may come. A progress
            token in `params` is replaced on the way. Codes TIMEOUT (the server is told that it is cancelled),
            SERVER (died, or its reply is not JSON; data as above), TOO_LONG.
`freeze`    {"spare": [PATTERN...]?} -> {"killed": INT}. Every server and every process of the sandbox but
            the driver itself is killed, for good: `call` and `start` fail with FROZEN from now on, those
            under way included; `run` and `arrange` go on working. Servers have their stdin closed first and
            a second to end by themselves, then one more after SIGTERM. Spared, to the driver's end, are
            processes that run when this is asked and whose command line, its words joined by spaces, is of a
            PATTERN (`*` stands for anything), with the first word's folder or without.
`forward`   {"ports": [INT...]} -> {}
            Listens at these TCP ports of the sandbox's loopback (127.0.0.1, and ::1 where there is one): each
            connection that comes is told with `opened` and carried over the line. For good: a freeze ends
            whoever is connected, not the listening. Code NETWORK.
`dial`      {"port": INT, "conn": INT} -> {}. Connects to a TCP port of the sandbox's 127.0.0.1, and carries
            that over the line. `conn`, negative, is to be the connection's number. Code NETWORK.
`ping`      {} -> {}

A connection has a number that is never used twice. Of it either end tells the other by notifications:
`data` {"conn": INT, "data": BASE64} (at most CHUNK_BYTES), `taken` {"conn": INT, "bytes": INT} (so many of
what the other has sent were passed on; never more than WINDOW_BYTES each way may wait to be), `finished`
{"conn": INT} (nothing more comes from this end), `reset` {"conn": INT} (it is broken, or closed both ways).
It is over when both have finished, or one has reset. What is said of a number that is over is passed over.

Notifications, server to driver: `cancel` {"id": INT}: the request of that id is given up; where it is a
`call`, the task's server is told with `notifications/cancelled`; it is then answered with code CANCELLED, a
`run`, `start` or `arrange` once nothing of it runs any more. `freeze` cannot be cancelled.
Driver to server: `ready` {"version": INT, "python": STR, "pid": INT}; `progress` {"id": INT, "params": {...}}
(id: the `call`'s; params as the task's server sent them); `message` {"id": INT | null, "server": NAME,
"params": {...}} (a log message of the task's server; id where exactly one call runs on that server);
`opened` {"conn": INT, "port": INT} (somebody inside has connected to a port that is forwarded);
`changed` {"server": NAME} (it said tools/list_changed); `exited` {"server": NAME, "exit_code": INT | null,
"stderr": STR} (a server that was up has died).

Anything the server sends renews the driver's lease; a driver that has heard nothing for LEASE_SECONDS, or
reads the end of its stdin, kills all it has started and ends. Whatever it starts has MARK_VARIABLE in its
environment, by which the driver knows its own, and SANDBOX_VARIABLE where the driver itself has it: by that
a provider finds them when the driver has been killed.
"""

VERSION = 1
LEASE_SECONDS = 60.0
LEASE_VARIABLE = "DECATHLON_LEASE_SECONDS"
CHANNEL_VARIABLE = "DECATHLON_CHANNEL"
SANDBOX_VARIABLE = "DECATHLON_SANDBOX"
MARK_VARIABLE = "DECATHLON_MARK"
MAX_LINE_BYTES = 64 * 1024 * 1024
WINDOW_BYTES = 256 * 1024
CHUNK_BYTES = 48 * 1024

# methods
ARRANGE = "arrange"
RUN = "run"
START = "start"
CALL = "call"
FREEZE = "freeze"
FORWARD = "forward"
DIAL = "dial"
PING = "ping"

# notifications
CANCEL = "cancel"
READY = "ready"
PROGRESS = "progress"
MESSAGE = "message"
CHANGED = "changed"
EXITED = "exited"
OPENED = "opened"
DATA = "data"
TAKEN = "taken"
FINISHED = "finished"
RESET = "reset"

# The closed table of error codes: what comes out of a sandbox is looked up here and nowhere else.
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

# What the sandbox's first process runs. It needs nothing but `os` and `sys` until the sources are there, and
# reads with `os.read` alone: `sys.stdin.buffer` reads ahead and would swallow the first message.
LOADER = """\
import os, sys
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
try:
    import json, importlib.util, subprocess, selectors
except ImportError as error:
    sys.stderr.write("decathlon: this Python lacks its standard library: %s\\n" % error)
    raise SystemExit(97)
if sys.version_info < (3, 10):
    sys.stderr.write("decathlon: Python 3.10 or later is needed, this is %s\\n" % sys.version.split()[0])
    raise SystemExit(98)
sources = json.loads(sources)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in sources:
            return importlib.util.spec_from_loader(name, self, origin=name, is_package="." not in name)
    def create_module(self, spec): return None
    def exec_module(self, module):
        exec(compile(sources[module.__name__], module.__name__, "exec"), module.__dict__)
    def get_source(self, name): return sources[name]
sys.meta_path.insert(0, Finder())
from decathlon_sandbox.driver import main
raise SystemExit(main())
"""
BOOT_COMMAND = ("python3", "-I", "-S", "-u", "-c", LOADER)
NO_STANDARD_LIBRARY_EXIT = 97
OLD_PYTHON_EXIT = 98
