"""Stand-ins for web sites on this machine's loopback, with certificates of an authority for tests."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority for tests. `pem` is its certificate; its key is only in memory."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Decathlon tests")])
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def identity(self, names: Collection[str]) -> str:
        """A certificate for these host names and its key, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, next(iter(names)))])
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(subject, self._name, key).add_extension(alternatives, critical=False)
        certificate = builder.add_extension(authority, critical=False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode() + private.decode()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


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
                stack.callback(server.server_close)
                stack.callback(server.shutdown)
                threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
                addresses += [f"{name}:{port}=127.0.0.1:{server.server_port}" for name in names]
        yield Sites(tuple(addresses), file, asked)


def _counting(handler: type[BaseHTTPRequestHandler], asked: list[str]) -> type[BaseHTTPRequestHandler]:
    def log_message(self: BaseHTTPRequestHandler, *_: Any) -> None:
        asked.append(f"{self.headers['Host']} {self.requestline}" if hasattr(self, "headers") else "invalid")

    return type(f"Counting{handler.__name__}", (handler,), {"log_message": log_message})
