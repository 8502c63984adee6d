"""A network of a sandbox's own, which leads to other machines and never to this machine.

slirp4netns(1) receives what the sandbox sends and passes it on through sockets of this machine, so it also
reaches what listens here: it refuses this machine's loopback interface, and routes in the sandbox refuse
every other address that this machine has when the sandbox is opened. There is no IPv6.

Decided 2026-11-24: slirp4netns alone, not pasta(1) as well. A second program would have to pass the same
attacks, and pasta looks once a second whether its sandbox has ended, which slirp4netns learns at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Self

import anyio

from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.host.mounts import device_launcher, file_with
from decathlon_mcp.sandboxes.host.processes import ProcessId
from decathlon_mcp.storage.disk import read_kernel_file
from decathlon_mcp.telemetry.logs import fields

PROGRAM = "slirp4netns"
TUN = Path("/dev/net/tun")
INSTALL = "install slirp4netns and iproute2 (apt-get install slirp4netns iproute2)"
OPEN_TUN = f"load the kernel's module tun, and allow the server's user to read and write {TUN}"
REFUSED = ("169.254.0.0/16", "224.0.0.0/4")
"""Besides this machine's addresses: link-local, such as a cloud's metadata, and groups, in which this machine
may be."""
END_SECONDS = 2.0
"""How long slirp4netns may take to end after SIGKILL."""
_LOG_BYTES = 4096
_log = logging.getLogger(__name__)

_NS_GET_USERNS = 0xB701  # linux/nsfs.h
# Refuses addresses, whose routes are its input, then executes the rest. Nothing leads out before that.
_REFUSE = 'nsenter --net="$1" ip -batch - && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class OwnNetwork:
    """How sandboxes of this machine get a network of their own.

    `program` is the path of slirp4netns, and `launcher` a command line that executes it where it can open
    TUN. `subnet` is the same for every sandbox; this machine has no address in it.
    """

    program: str
    subnet: IPv4Network
    launcher: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls) -> Self:
        """Raises ProviderUnavailableError if this machine lacks what that needs."""
        for name in (PROGRAM, "ip", "nsenter"):
            if shutil.which(name) is None:
                raise ProviderUnavailableError(f"there is no {name} on the PATH: {INSTALL}")
        if not os.access(TUN, os.R_OK | os.W_OK):
            raise ProviderUnavailableError(f"{TUN} is missing, or this user may not open it: {OPEN_TUN}")
        subnets, taken = list(IPv4Network("10.0.0.0/16").subnets(new_prefix=24)), _machine_addresses()
        # From 10.0.2.0/24, slirp4netns's own choice.
        subnet = next(subnet for subnet in subnets[2:] if not any(map(subnet.overlaps, taken)))
        return cls(str(shutil.which(PROGRAM)), subnet, device_launcher(TUN))

    @property
    def nameserver(self) -> IPv4Address:
        """Address in a sandbox of this machine's first name server, also of one on the machine's loopback."""
        return self.subnet[3]

    def command(self, user_namespace: int, network_namespace: int, ready: int, hang_up: int) -> list[str]:
        """The command line for descriptors of a sandbox's namespaces. Its input is `_refused_routes`.

        It writes to `ready` when the network can be used, and ends when `hang_up` is hung up.
        """
        user, network = f"/proc/self/fd/{user_namespace}", f"/proc/self/fd/{network_namespace}"
        return [
            # There it is root, and can isolate itself from this machine.
            *("nsenter", "--preserve-credentials", f"--user={user}", "--"),
            *("/bin/sh", "-c", _REFUSE, "sh", network),
            *(self.program, "--configure", "--mtu=65520", f"--cidr={self.subnet}", "--disable-host-loopback"),
            *("--enable-sandbox", "--enable-seccomp", f"--ready-fd={ready}", f"--exit-fd={hang_up}"),
            *("--netns-type=path", network, "tap0"),
        ]


class NetworkHelper:
    """The process that connects one sandbox's network, outside of the sandbox.

    It ends with the last process that has the sandbox's stderr open, so it needs no server. What it uses
    counts as the sandbox's: it is in its control group.
    """

    def __init__(self, popen: subprocess.Popen[bytes], ready: int, log: int, files: ExitStack) -> None:
        self.id = ProcessId.of(popen.pid)
        self._popen = popen
        self._ready = ready
        self._log = log
        self._files = files

    @classmethod
    def start(
        cls,
        network: OwnNetwork,
        first_process: ProcessId,
        *,
        hang_up: int,
        launcher: Sequence[str],
        environment: Mapping[str, str],
    ) -> Self:
        """Start it for the sandbox of a first process.

        `launcher`: a command line that executes the rest of it. Raises SandboxLostError if the first process
        has ended, ProviderUnavailableError.
        """
        with ExitStack() as own, ExitStack() as inherited:
            user_namespace, network_namespace = open_namespaces(first_process, inherited)
            own_ready, ready = _pipe(own, inherited)
            own_log, log = _pipe(own, inherited)
            # It has both ends, and does not wait for room: nobody reads what it says once it is ready.
            log = os.open(f"/proc/self/fd/{log}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            inherited.callback(os.close, log)
            routes = file_with(_refused_routes().encode())
            inherited.callback(os.close, routes)
            try:
                popen = subprocess.Popen(
                    [*launcher, *network.command(user_namespace, network_namespace, ready, hang_up)],
                    stdin=routes,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=environment,
                    pass_fds=(user_namespace, network_namespace, ready, hang_up),
                    start_new_session=True,
                )
            except OSError as error:
                raise ProviderUnavailableError(f"{PROGRAM} cannot be started: {error.strerror}") from error
            return cls(popen, own_ready, own_log, own.pop_all())

    async def wait_until_ready(self) -> None:
        """Raises ProviderUnavailableError if it ends before that."""
        await anyio.wait_readable(self._ready)
        if os.read(self._ready, 1):
            self._files.close()
            return
        os.set_blocking(self._log, False)
        log = b""
        with suppress(BlockingIOError):
            log = os.read(self._log, _LOG_BYTES)
        # It may name paths of this machine, which are not for clients.
        _log.warning(
            "a sandbox's network was not connected", extra=fields(why=log.decode("utf-8", "replace"))
        )
        raise ProviderUnavailableError(f"{PROGRAM} connected no network; the server's log has its reason")

    def end(self) -> bool:
        """Kill and reap it; whether it has ended. Blocks."""
        self._files.close()
        self._popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=END_SECONDS)
        return self._popen.returncode is not None


def end_helper(process_id: ProcessId) -> bool:
    """Kill a helper that another server has started; whether it has ended. Blocks."""
    try:
        with process_id.opened() as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(END_SECONDS * 1000))
    except ProcessLookupError:
        return True


def _pipe(own: ExitStack, inherited: ExitStack) -> tuple[int, int]:
    """A new pipe: the server's end, and the helper's."""
    read_end, write_end = os.pipe()
    own.callback(os.close, read_end)
    inherited.callback(os.close, write_end)
    return read_end, write_end


def open_namespaces(first_process: ProcessId, stack: ExitStack) -> tuple[int, int]:
    """Descriptors of the user namespace that owns the sandbox's network, and of the network's."""
    try:
        network = os.open(f"/proc/{first_process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, network)
        # The first process may be in another namespace, which bubblewrap has created for its user.
        user = fcntl.ioctl(network, _NS_GET_USERNS)
        stack.callback(os.close, user)
    except OSError as error:
        raise SandboxLostError(f"the sandbox has no network any more: {error.strerror}") from None
    # Looked at after the files are open: the number may belong to another process by now.
    if ProcessId.of(first_process.pid) != first_process:
        raise SandboxLostError("the sandbox's first process has ended")
    return user, network


def _refused_routes() -> str:
    """Commands of ip(8) that make a sandbox refuse to send to this machine."""
    return "".join(
        f"route replace prohibit {network}\n" for network in (*map(str, _machine_addresses()), *REFUSED)
    )


def _machine_addresses() -> list[IPv4Network]:
    """Every address of this machine, also of container bridges, except its loopback.

    Raises ProviderUnavailableError.
    """
    # `ip address` would not show what has been added to the kernel's table of local addresses alone.
    found: dict[IPv4Network, None] = {}
    address = ""
    try:
        table = read_kernel_file(Path("/proc/net/fib_trie"))
    except OSError as error:
        message = f"the addresses of this machine, to be refused, cannot be read: {error.strerror}"
        raise ProviderUnavailableError(message) from error
    for line in table.splitlines():
        kind, _, value = line.strip().partition(" ")
        if kind == "|--":
            address = value
        elif value.endswith(" LOCAL"):
            found[IPv4Network(f"{address}{kind}", strict=False)] = None
    # A rule that sends everything to local sockets, as a transparent proxy needs it, is no address.
    return [network for network in found if network.prefixlen and not network.is_loopback]
