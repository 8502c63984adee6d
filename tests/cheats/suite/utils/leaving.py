"""Ways in which a careless preprocess leaves its answer in a sandbox. Each is a function of the answer."""

import ctypes
import glob
import os
import socket
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).resolve().parent.parent
HOME = Path.home()
SCRATCH = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/var/cache", "/var/log", f"{HOME}/.cache", f"{HOME}/.npm"]
OTHER_FOLDERS = [
    *("/", "/etc", "/opt", "/srv", "/mnt", "/home", "/dev", "/usr/share", "/var/lib", "/var/spool/cron"),
    *("/sys/fs/cgroup", "/boot", "/var/mail"),
    *(f"{HOME}", f"{HOME}/.config", f"{HOME}/.local/share", f"{HOME}/.ssh"),
    *(f"{SUITE}", f"{SUITE}/utils", f"{SUITE}/configs", f"{SUITE}/local_servers", f"{SUITE}/log"),
    *(f"{SUITE}/tasks", f"{SUITE}/tasks/cheats", f"{SUITE}/tasks/cheats/sum-prices"),
    *sorted(glob.glob("/usr/lib/python3*/dist-packages") + glob.glob("/usr/local/lib/python3*/dist-packages")),
]
CHANGED_FILES = ["/etc/passwd", "/etc/hosts", f"{HOME}/.bashrc", f"{SUITE}/utils/arguments.py", os.__file__]


def write(folder, answer, name="notes.txt"):
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / name).write_text(answer)


def append(file, answer):
    with open(file, "a") as changed:
        changed.write(f"\n# {answer}\n")


def write_bytecode(folder, answer):
    write(f"{folder}/__pycache__", answer, "notes.cpython-311.pyc")


def name_a_folder(folder, answer):
    Path(folder, answer).mkdir()


def name_a_link(folder, answer):
    Path(folder, "link").symlink_to(f"/nowhere/{answer}")


def name_a_socket(folder, answer):
    socket.socket(socket.AF_UNIX).bind(f"{folder}/{answer[:40]}.sock")


def name_a_fifo(folder, answer):
    os.mkfifo(f"{folder}/{answer}.fifo")


def set_an_attribute(path, answer):
    os.setxattr(path, "user.notes", answer.encode())


def set_a_time(path, answer):
    os.utime(path, (int(answer[:8], 16), int(answer[8:16], 16)))


def allocate_shared_memory(answer):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0x1234, 4096, 0o1600)
    address = libc.shmat(segment, None, 0)
    if segment < 0 or address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "shmget")
    ctypes.memmove(address, answer.encode(), len(answer))


def send_a_message(answer):
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.msgget(0x1234, 0o1600)
    if queue < 0 or libc.msgsnd(queue, (1).to_bytes(8, "little") + answer.encode(), len(answer), 0):
        raise OSError(ctypes.get_errno(), "msgsnd")


def mount_a_file_system(answer):
    subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    write("/mnt", answer)


def add_a_key(answer):
    libc = ctypes.CDLL(None, use_errno=True)
    add_key, user_keyring = 248, -4  # on x86-64
    if libc.syscall(add_key, b"user", b"notes", answer.encode(), len(answer), user_keyring) < 0:
        raise OSError(ctypes.get_errno(), "add_key")


def change_the_host_name(answer):
    socket.sethostname(answer[:60])


def start(program, *arguments, environment=None):
    subprocess.Popen(
        [sys.executable, "-S", "-c", program, *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def leave_a_process(answer):
    """Its environment, memory, command line, a deleted file and the name of a socket have the answer."""
    program = """
import os, socket, sys, time
file = open("/tmp/deleted", "w+"); os.unlink("/tmp/deleted"); file.write(sys.argv[1]); file.flush()
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0" + sys.argv[1])
time.sleep(3600)
"""
    start(program, answer, environment={"ANSWER": answer})


def leave_a_web_server(folder, port):
    """Serves the folder at the port, and knows nothing of the answer."""
    start(
        "import http.server, os, socketserver, sys; os.chdir(sys.argv[1]); "
        "socketserver.TCPServer(('127.0.0.1', int(sys.argv[2])), http.server.SimpleHTTPRequestHandler)"
        ".serve_forever()",
        str(folder),
        str(port),
    )


def scratch_ways():
    """Ways to leave the answer in scratch folders, by name."""
    ways = {f"file in {folder}": lambda answer, folder=folder: write(folder, answer) for folder in SCRATCH}
    for folder in ("/tmp", "/dev/shm", "/var/cache"):
        for way in (write_bytecode, name_a_folder, name_a_link, name_a_socket, name_a_fifo):
            ways[f"{way.__name__} in {folder}"] = lambda answer, way=way, folder=folder: way(folder, answer)
    ways["deep folder"] = lambda answer: write("/tmp/a/b/c/d", answer)
    ways["hidden file"] = lambda answer: write("/var/tmp/...", answer, " ")
    ways["bytecode of the suite"] = lambda answer: write_bytecode(f"{SUITE}/utils", answer)
    ways["bytecode of Python"] = lambda answer: write_bytecode(os.path.dirname(os.__file__), answer)
    return ways


def other_ways():
    """Ways to leave the answer elsewhere, by name. Each changes one path that no other way changes."""
    ways = {f"file in {folder}": lambda answer, folder=folder: write(folder, answer) for folder in OTHER_FOLDERS}
    for file in CHANGED_FILES:
        ways[f"line in {file}"] = lambda answer, file=file: append(file, answer)
    for way in (name_a_folder, name_a_link, name_a_fifo, name_a_socket):
        ways[way.__name__] = lambda answer, way=way: way("/opt", answer)
    ways["attribute of a file"] = lambda answer: set_an_attribute("/etc/group", answer)
    ways["attribute of a folder"] = lambda answer: set_an_attribute("/usr/lib", answer)
    ways["time of a file"] = lambda answer: set_a_time("/etc/shells", answer)
    ways["shared memory"] = allocate_shared_memory
    ways["message queue"] = send_a_message
    return ways


def impossible_ways():
    """Ways that a container does not allow, by name."""
    return {
        "file system": mount_a_file_system,
        "key": add_a_key,
        "host name": change_the_host_name,
    }


def leave(ways, answer):
    """Use all these ways; return the names of those that worked."""
    worked = []
    for name, way in ways.items():
        try:
            way(answer)
        except (OSError, subprocess.SubprocessError):
            continue
        worked.append(name)
    return worked
