"""The address that a server listens on, and the host names that it answers to."""

# Without imports that take long: `doctor` needs it too.
from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.authentication import AllowedHosts, Tokens, normalized_origin

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
LISTEN_BACKLOG = 2048


def hosts_for(
    host: str,
    extra_names: tuple[str, ...],
    tokens: Tokens | None,
    origins: tuple[str, ...] = (),
    public_url: str | None = None,
) -> AllowedHosts:
    """The host names, and the origins of pages, to accept when listening on `host`.

    A proxy may pass on the host of `public_url`, which is accepted too. `tokens` None: who reaches the
    address needs none, wherever it is.

    Raises SettingsError for a host beyond loopback without tokens, and for what is no origin.
    """
    normalized: list[str] = []
    for origin in origins:
        if (known := normalized_origin(origin)) is None:
            raise SettingsError(
                f"--allowed-origin {origin}: expected SCHEME://HOST or SCHEME://HOST:PORT, as browsers send"
            )
        normalized.append(known)
    if host not in LOOPBACK and tokens is not None and not tokens:
        raise SettingsError(
            f"--host {host} can be reached from other machines, and there are no tokens: give --tokens FILE "
            "(`decathlon-mcp token NAME` prints a line for it), or stay on 127.0.0.1"
        )
    # Nobody connects to a wildcard address by its name.
    own_name = () if host in ("0.0.0.0", "::") else (f"[{host}]" if ":" in host else host,)
    public_name = () if public_url is None else (urlsplit(public_url).netloc.rpartition("@")[2],)
    names = tuple(dict.fromkeys((*AllowedHosts().names, *own_name, *public_name, *extra_names)))
    return AllowedHosts(names, tuple(normalized))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free port. Raises SettingsError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        # A port over 65535 is an OverflowError, which has no `strerror`.
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        # A name that cannot be resolved, or an address that this machine does not have.
        is_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        cure = "choose another --host" if is_host else "choose another --port"
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}; {cure}",
            inUse=getattr(error, "errno", None) == errno.EADDRINUSE,
        ) from None
    return listener


def inherit_listener(descriptor: int) -> socket.socket:
    """The listening TCP socket with this descriptor, which another process opened.

    Raises SettingsError if it is something else.
    """
    try:
        listener = socket.socket(fileno=descriptor)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise SettingsError(f"the inherited socket cannot be used: {error.strerror}") from None
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or not is_listening:
        raise SettingsError(
            "the inherited socket is no listening TCP socket: give its unit ListenStream=PORT"
        )
    listener.set_inheritable(False)
    return listener
