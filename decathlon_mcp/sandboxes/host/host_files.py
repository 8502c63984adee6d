"""This machine's own programs as the root file system of a sandbox: /usr, parts of /etc, the server's Python.

Whatever else the machine has is absent: homes, the state folder, /run, /opt, /srv, /sys. Visible folders that
may contain answers are replaced by empty folders, and so are their repositories. Lists with hashes of their
files are replaced by others (`answer_traces`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, SubprocessError
from typing import Self

import anyio
from anyio import to_thread

from decathlon_mcp.sandboxes.host.answer_traces import find_traces, repositories_of
from decathlon_mcp.sandboxes.host.image_folder import DEFAULT_PATH
from decathlon_mcp.sandboxes.host.mounts import (
    HOSTS,
    CopiedFiles,
    SandboxUser,
    WritableFolder,
    bind,
    closed_parent,
    memory_mount,
)

HOST_USER = SandboxUser(1000, 1000, PurePosixPath("/home/agent"))
"""The user inside: never 0, so that programs do not take themselves for root."""
PASSWD = f"agent:x:1000:1000:agent:{HOST_USER.home}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
GROUP = "agent:x:1000:\nnogroup:x:65534:\n"
USR = Path("/usr")
LINKED_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""At the top: links into /usr, or folders of their own."""
ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl", "pki", "ca-certificates"),
    *("localtime", "timezone", "locale.conf", "locale.alias", "default/locale", "fonts", "mime.types"),
    *("protocols", "services", "nsswitch.conf", "host.conf", "gai.conf", "magic", "terminfo", "inputrc"),
    *("os-release", "debian_version"),
)
"""What programs read of /etc, without what it says about people, services and secrets of this machine."""
PRIVATE_KEYS = ("ssl/private", "pki/tls/private")
"""In /etc: hidden, although only root can read them."""
PYTHON_ETC = "python*"
"""Debian's Python has a part of its library there."""
RESOLVER = "resolv.conf"
"""Only with a network. In one of the sandbox's own, without the machine's name servers."""
PYTHON_FILES = (*("bin", "include", "lib", "lib32", "lib64", "libexec", "share", "ssl", "pyvenv.cfg"),)
"""In the folder of a Python or a virtual environment: programs, libraries and their data."""
PYTHONS_IN_USR = "lib*/python*"
"""Where packages of the system's Pythons are."""
SYSTEM_IN_USR = re.compile("bin|sbin|lib(32|64|x32|exec)?|share|include|games|etc")
"""Folders of /usr that only the operating system's packages fill: not searched for answers, which would take
seconds. Images often have an application in /usr/src or /usr/local."""
PASSED_VARIABLES = ("LANG", "LANGUAGE", "TZ")
PASSED_PREFIX = "LC_"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CERTIFICATE_VARIABLES = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
)
"""With a network: by which way, and whom to trust. The certificates are there too."""
_HIDDEN_BYTES = 4096
_FIND_FOLDERS = "import json, sys; print(json.dumps([sys.version, *filter(None, sys.path)]))"


@dataclass(frozen=True, slots=True)
class HostFiles:
    """See `mounts.RootFiles`."""

    reached: tuple[Path, ...]
    """Folders outside of /usr that the sandbox's user must be able to enter."""
    shown: tuple[Path, ...]
    """Files and folders outside of /usr that are there inside; none lies in another."""
    hidden: tuple[Path, ...]
    """Folders that are empty inside."""
    replaced: Mapping[Path, bytes]
    """Files with another content inside."""
    environment: Mapping[str, str]
    has_network: bool = False
    nameserver: IPv4Address | None = None
    """In a network of the sandbox's own."""
    certificates: tuple[Path, ...] = ()
    """Files and folders that variables name."""
    hosts: bytes = HOSTS
    """The content of /etc/hosts."""

    user = HOST_USER
    owner = (0, 0)
    digest = None
    location = None

    @classmethod
    def of_this_server(cls, hidden: Iterable[Path] = ()) -> Self:
        """This machine's programs and the server's Python with its packages, without the hidden folders.

        Blocks: it searches for traces of the hidden folders. Raises ProviderUnavailableError.
        """
        prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
        # `python3` is the server's own.
        environment = {**_language_variables(), "PATH": f"{_absolute(sys.executable).parent}:{DEFAULT_PATH}"}
        return cls(*_view(list(map(Path, prefixes)), (), hidden), environment)

    @classmethod
    def for_program(
        cls, hidden: Iterable[Path], prefixes: Sequence[Path], folders: Sequence[Path], hosts: bytes
    ) -> Self:
        """This machine's programs, Pythons with their packages (`prefixes`) and folders of a program.

        Of the server's Python there is the standard library. Otherwise as `of_this_server`.
        """
        base = map(Path, (sys.base_prefix, sys.base_exec_prefix))
        environment = {**_language_variables(), "PATH": f"{own_python().parent}:{DEFAULT_PATH}"}
        return cls(*_view([*base, *prefixes], folders, hidden), environment, hosts=hosts)

    def with_network(self, nameserver: IPv4Address | None) -> Self:
        """The same files for a sandbox with a network. `nameserver`: if the network is its own."""
        proxies = {name: value for name, value in os.environ.items() if name.lower() in PROXY_VARIABLES}
        certificates = {
            name: value
            for name in CERTIFICATE_VARIABLES
            if (value := os.environ.get(name, "")) and _is_public(Path(value))
        }
        return replace(
            self,
            environment={**self.environment, **proxies, **certificates},
            has_network=True,
            nameserver=nameserver,
            certificates=tuple(dict.fromkeys(map(Path, certificates.values()))),
        )

    def find_program(self, name: str) -> Path | None:
        found = shutil.which(name, path=self.environment["PATH"])
        return None if found is None else Path(found)

    def real_path(self, path: PurePosixPath) -> PurePosixPath:
        # The folders at the top are made for the sandbox, and links among them lead into /usr only.
        return path

    def first_mounts(self, mounts: Sequence[PurePosixPath], copied: CopiedFiles) -> Iterator[str]:
        yield from bind(USR, PurePosixPath(USR))
        for name in LINKED_FOLDERS:
            yield from bind(Path("/", name), PurePosixPath("/", name))
        yield from self._etc_mounts(copied)
        for path in self.certificates:
            yield from ("--ro-bind", str(path), str(path))
        writable = [mount for mount in mounts if mount.parts[1:2] not in (("proc",), ("dev",))]
        yield from self._mounts(
            lambda path: not any(map(PurePosixPath(path).is_relative_to, writable)), copied
        )

    def mounts_in(self, folder: WritableFolder, copied: CopiedFiles) -> Iterator[str]:
        yield from self._mounts(lambda path: PurePosixPath(path).is_relative_to(folder.path), copied)

    def _mounts(self, is_wanted: Callable[[Path], bool], copied: CopiedFiles) -> Iterator[str]:
        for path in filter(is_wanted, self.shown):
            yield from bind(path, PurePosixPath(path))
        yield from _hide(filter(is_wanted, self.hidden))
        for path in filter(is_wanted, self.replaced):
            content = copied.add_content(self.replaced[path])
            yield from ("--perms", "0444", "--ro-bind-data", content, str(path))

    def _etc_mounts(self, copied: CopiedFiles) -> Iterator[str]:
        etc = Path("/etc")
        names = [*ETC, *sorted(path.name for path in etc.glob(PYTHON_ETC))]
        contents = {"hosts": self.hosts, "passwd": PASSWD.encode(), "group": GROUP.encode()}
        if self.nameserver is not None:
            contents[RESOLVER] = _resolver(etc / RESOLVER, self.nameserver)
        elif self.has_network:
            names.append(RESOLVER)
        for name in names:
            # Links are followed: what they lead to, such as /run, need not be there inside.
            if (etc / name).exists():
                yield from ("--ro-bind-try", str(etc / name), str(etc / name))
        yield from _hide(etc / name for name in PRIVATE_KEYS if (etc / name).is_dir())
        for name, content in contents.items():
            yield from ("--perms", "0644", "--ro-bind-data", copied.add_content(content), str(etc / name))


def _resolver(file: Path, nameserver: IPv4Address) -> bytes:
    """What resolv.conf(5) says about the search for names, with another name server."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    kept = [line for line in lines if line.startswith(("search", "domain", "options"))]
    return "".join(f"{line}\n" for line in (f"nameserver {nameserver}", *kept)).encode()


def _is_public(path: Path) -> bool:
    """Whether a sandbox's user can reach a file or folder."""
    return path.is_absolute() and path.exists() and (os.geteuid() != 0 or closed_parent(path) is None)


def _can_be_entered(path: Path, shown: Sequence[Path]) -> bool:
    """Whether a file or folder lies in what is shown, so that a sandbox could read it."""
    above = [folder for folder in path.parents if any(map(folder.is_relative_to, shown))]
    # Root's sandboxes run as another user, who can neither read nor cover what lies in such a folder.
    closed = os.geteuid() == 0 and not all(folder.stat().st_mode & stat.S_IXOTH for folder in above)
    return any(map(path.is_relative_to, shown)) and not closed


def _hide(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        yield from memory_mount(WritableFolder(PurePosixPath(folder), _HIDDEN_BYTES, 0o755))
        yield from ("--remount-ro", str(folder))


def _language_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIX)
    }


def own_python() -> Path:
    """The Python that the server's environment is made of, by its real path."""
    return Path(sys.executable).resolve()


def python_files(prefix: Path) -> list[Path]:
    """What is shown of a Python's folder or of a virtual environment; nothing else in it is."""
    return [path for name in PYTHON_FILES if os.path.lexists(path := prefix / name)]


def _view(
    prefixes: Sequence[Path], folders: Sequence[Path], hidden: Iterable[Path]
) -> tuple[tuple[Path, ...], tuple[Path, ...], tuple[Path, ...], Mapping[Path, bytes]]:
    """Folders that must be reached, and what is shown, hidden and replaced; see `HostFiles`."""
    pythons, others = _both_paths(prefixes), _both_paths(folders)
    reached = _outermost(path for path in (*pythons, *others) if not path.is_relative_to(USR))
    shown = _outermost(
        path
        for path in (*others, *(file for prefix in pythons for file in python_files(prefix)))
        if not path.is_relative_to(USR)
    )
    readable = (USR, *shown)
    given = list(hidden)
    covered = set(
        _both_paths([*given, *(path for each in given for path in repositories_of(each.resolve()))])
    )
    if not covered:
        return reached, shown, (), {}
    others_in_usr = [path for path in USR.iterdir() if not SYSTEM_IN_USR.fullmatch(path.name)]
    of_system = [*USR.glob(PYTHONS_IN_USR), *others_in_usr]
    inside = [path for path in pythons if path.is_relative_to(USR) and path not in (USR, USR / "local")]
    searched = _outermost(path for path in (*shown, *of_system, *inside) if not path.is_symlink())
    traces = find_traces(searched, covered)
    covered |= {path for copy in traces.folders for path in (copy, *repositories_of(copy.resolve()))}
    empty = _outermost(path for path in covered if path.is_dir() and _can_be_entered(path, readable))
    replaced = {
        path: content
        for path, content in traces.files.items()
        if _can_be_entered(path, readable) and not any(map(path.is_relative_to, empty))
    }
    return reached, shown, empty, replaced


def _both_paths(folders: Iterable[Path]) -> tuple[Path, ...]:
    """The absolute paths, each also without links: the program of a virtual environment is a link."""
    return tuple(
        dict.fromkeys(path for folder in map(_absolute, folders) for path in (folder, folder.resolve()))
    )


def _absolute(path: str | Path) -> Path:
    """The path without `..`, whose folders need not be there inside.

    Links are kept: a virtual environment is recognized by the path of its Python.
    """
    return Path(os.path.abspath(path))  # noqa: PTH100


def _outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The paths that lie in no other path."""
    found: list[Path] = []
    for path in sorted(dict.fromkeys(paths), key=lambda path: len(path.parts)):
        if not any(map(path.is_relative_to, found)):
            found.append(path)
    return tuple(found)


class ProgramsIdentity:
    """Finds a text that changes when another Python is installed, or packages are.

    Programs that are no Python packages, such as npm's, can change without it.
    """

    def __init__(self) -> None:
        self._python: Path | None = None
        self._folders: list[str] = []

    async def identity(self) -> str | None:
        """The present identity; None if there is no usable `python3`. Looks at the times of some folders."""
        program = shutil.which("python3")
        if program is None:
            return None
        python = Path(program)
        if python != self._python:
            try:
                with anyio.fail_after(10):  # starting Python takes 20 ms on an idle machine
                    result = await anyio.run_process([program, "-c", _FIND_FOLDERS], stderr=DEVNULL)
                self._folders = json.loads(result.stdout)
            except (OSError, SubprocessError, TimeoutError, ValueError):
                return None
            self._python = python
        return await to_thread.run_sync(self._digest, python)

    def _digest(self, python: Path) -> str:
        # An installation changes the time of its `site-packages`.
        times = {folder: _time_ns(Path(folder)) for folder in (str(python.resolve()), *self._folders)}
        parts = [os.environ.get("PATH"), str(python), times]
        return f"host:{sha256(json.dumps(parts).encode()).hexdigest()}"


def _time_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
