"""This machine's own programs as the root file system of a sandbox: /usr, parts of /etc, the server's Python.

Whatever else the machine has is absent: homes, the state folder, /run, /opt, /srv, /sys. Folders that may
contain answers, and lie in one of those that are there, are replaced by empty ones.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from typing import Self

from decathlon_mcp.sandboxes.bubblewrap.image_folder import DEFAULT_PATH
from decathlon_mcp.sandboxes.bubblewrap.mount_view import closed_parent
from decathlon_mcp.sandboxes.bubblewrap.mounts import (
    HOSTS,
    CopiedFiles,
    SandboxUser,
    WritableFolder,
    bind,
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
PASSED_VARIABLES = ("LANG", "LANGUAGE", "TZ")
PASSED_PREFIX = "LC_"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CERTIFICATE_VARIABLES = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
)
"""With a network: by which way, and whom to trust. The certificates are there too."""
_HIDDEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class HostFiles:
    """See `mounts.RootFiles`.

    `prefixes`: folders of the Python that runs the server, and of the one that its virtual environment is
    made of, and others that are shown. `hidden`: folders that are empty inside, if they are there at all.
    `nameserver`: that of a network of the sandbox's own. `certificates`: files and folders that variables
    name. `hosts`: the content of /etc/hosts.
    """

    prefixes: tuple[Path, ...]
    hidden: tuple[Path, ...]
    environment: Mapping[str, str]
    has_network: bool = False
    nameserver: IPv4Address | None = None
    certificates: tuple[Path, ...] = ()
    hosts: bytes = HOSTS

    user = HOST_USER
    owner = (0, 0)
    digest = None
    location = None

    @classmethod
    def of_this_server(
        cls,
        hidden: Iterable[Path] = (),
        *,
        has_network: bool = False,
        nameserver: IPv4Address | None = None,
        shown: Sequence[Path] = (),
        hosts: bytes = HOSTS,
    ) -> Self:
        """`shown`: folders that can be read besides this server's Python."""
        prefixes = _prefixes(shown)
        passed = {
            name: value
            for name, value in os.environ.items()
            if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIX)
        }
        certificates: dict[str, str] = {}
        if has_network:
            passed |= {name: value for name, value in os.environ.items() if name.lower() in PROXY_VARIABLES}
            certificates = {
                name: value
                for name in CERTIFICATE_VARIABLES
                if (value := os.environ.get(name, "")) and _is_public(Path(value))
            }
        # `python3` is the server's own. Not resolved: a virtual environment is recognized by the path.
        path = f"{Path(sys.executable).parent}:{DEFAULT_PATH}"
        readable = (USR, *prefixes)
        covered = {
            folder for given in hidden for folder in (given.absolute(), given.resolve()) if folder.is_dir()
        }
        return cls(
            prefixes,
            tuple(sorted(folder for folder in covered if _can_be_entered(folder, readable))),
            {**passed, **certificates, "PATH": path},
            has_network,
            nameserver,
            tuple(dict.fromkeys(map(Path, certificates.values()))),
            hosts,
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
        for prefix in self.prefixes:
            if not any(map(PurePosixPath(prefix).is_relative_to, writable)):
                yield from ("--ro-bind", str(prefix), str(prefix))
        yield from self._hide(
            [folder for folder in self.hidden if not any(map(PurePosixPath(folder).is_relative_to, writable))]
        )

    def mounts_in(self, folder: WritableFolder, copied: CopiedFiles) -> Iterator[str]:
        for prefix in self.prefixes:
            if PurePosixPath(prefix).is_relative_to(folder.path):
                yield from ("--ro-bind", str(prefix), str(prefix))
        yield from self._hide(
            [hidden for hidden in self.hidden if PurePosixPath(hidden).is_relative_to(folder.path)]
        )

    def _hide(self, folders: Iterable[Path]) -> Iterator[str]:
        for folder in folders:
            yield from memory_mount(WritableFolder(PurePosixPath(folder), _HIDDEN_BYTES, 0o755))
            yield from ("--remount-ro", str(folder))

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
        yield from self._hide(etc / name for name in PRIVATE_KEYS if (etc / name).is_dir())
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


def _can_be_entered(folder: Path, shown: Sequence[Path]) -> bool:
    """Whether a folder lies in one that is shown, so that a sandbox could read it."""
    above = [path for path in folder.parents if any(map(path.is_relative_to, shown))]
    # Root's sandboxes run as another user, who can neither read nor cover what lies in such a folder.
    closed = os.geteuid() == 0 and not all(path.stat().st_mode & stat.S_IXOTH for path in above)
    return any(map(folder.is_relative_to, shown)) and not closed


def _prefixes(shown: Sequence[Path]) -> tuple[Path, ...]:
    """The folders of the server's Python, and `shown`, outside of /usr; those that contain others first."""
    found: dict[Path, None] = {}
    for name in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *shown):
        path = Path(os.path.abspath(name))  # noqa: PTH100  (links are kept)
        found |= dict.fromkeys((path, path.resolve()))
    # The program of a virtual environment is a link, which may lead through others.
    folders = [path for path in found if not path.is_relative_to(USR)]
    folders.sort(key=lambda path: len(path.parts))
    return tuple(
        path
        for number, path in enumerate(folders)
        if not any(path.is_relative_to(above) for above in folders[:number])
    )
