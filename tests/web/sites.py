"""Stand-ins for web sites on this machine's loopback, with certificates of an authority for tests."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.arxiv.arxiv_server import NAMES, Handler, Paper
from tests.arxiv.authority import Authority


@dataclass(frozen=True, slots=True)
class Sites:
    """Running sites. `addresses`: for `--web-address`. `asked`: the request lines that they received."""

    addresses: tuple[str, ...]
    authority: Path
    asked: list[str] = field(default_factory=list[str])


@contextmanager
def sites(folder: Path, handlers: Mapping[tuple[str, ...], type[BaseHTTPRequestHandler]]) -> Generator[Sites]:
    """Serve host names with these handlers, over HTTP and HTTPS, until the context exits."""
    authority, asked, addresses = Authority(), list[str](), list[str]()
    file = folder / "sites-authority.pem"
    file.write_text(authority.pem)
    with ExitStack() as stack:
        for names, handler in handlers.items():
            identity = folder / "identity.pem"
            identity.write_text(authority.identity(names))
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(identity)
            counting = _counting(handler, asked)
            for port, context in ((80, None), (443, tls)):
                server = ThreadingHTTPServer(("127.0.0.1", 0), counting)
                server.daemon_threads = True
                if context is not None:
                    server.socket = context.wrap_socket(
                        server.socket, server_side=True, do_handshake_on_connect=False
                    )
                stack.callback(_stop, server)
                threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
                addresses += [f"{name}:{port}=127.0.0.1:{server.server_port}" for name in names]
        yield Sites(tuple(addresses), file, asked)


@contextmanager
def arxiv_sites(folder: Path, papers: list[Paper]) -> Generator[Sites]:
    """Serve arXiv's names with these papers."""
    handler = type("ArxivHandler", (Handler,), {"papers": papers})
    with sites(folder, {NAMES: handler}) as running:
        yield running


def _counting(handler: type[BaseHTTPRequestHandler], asked: list[str]) -> type[BaseHTTPRequestHandler]:
    def log_message(self: BaseHTTPRequestHandler, *_: Any) -> None:
        asked.append(f"{self.headers['Host']} {self.requestline}" if hasattr(self, "headers") else "invalid")

    return type(f"Counting{handler.__name__}", (handler,), {"log_message": log_message})


def _stop(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
