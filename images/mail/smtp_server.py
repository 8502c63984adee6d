"""SMTP for the users of one mail server: a message is in its mailboxes before the sender's command returns.

Both ports offer a login and require none: the MCP server emails-mcp 0.1.12 does not log in, as it looks for
the server's extensions before its EHLO. A message to another domain is accepted at the submission port, or
after a login, and goes nowhere.
"""

import asyncio
import email.utils
import logging
import smtplib
import socket
import warnings
from collections.abc import Mapping, Sequence
from email.parser import BytesHeaderParser
from hmac import compare_digest
from pathlib import Path

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

RELAY_PORT, SUBMISSION_PORT = 2525, 1587
MESSAGE_BYTES = 64 << 20
RECIPIENTS = 1000
DELIVERY_SECONDS = 60.0
BACKLOG = 128


def listen() -> Mapping[int, socket.socket]:
    """Sockets that listen at both ports of the loopback interface. Raises OSError."""
    return {
        port: socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        for port in (RELAY_PORT, SUBMISSION_PORT)
    }


def serve(listeners: Mapping[int, socket.socket], users: Mapping[str, str], lmtp: Path) -> None:
    """Serve both ports until the process ends. `users`: passwords by address. `lmtp`: Dovecot's socket."""
    # A login without TLS is what upstream's scripts need, and connections never leave the machine.
    warnings.filterwarnings("ignore", module="aiosmtpd")
    logging.getLogger("mail.log").setLevel(logging.ERROR)
    asyncio.run(_serve(listeners, users, lmtp))


async def _serve(listeners: Mapping[int, socket.socket], users: Mapping[str, str], lmtp: Path) -> None:
    loop = asyncio.get_running_loop()
    hostname = next(iter(users)).partition("@")[2]

    def protocol(port: int) -> SMTP:
        submission = port == SUBMISSION_PORT
        return SMTP(
            Delivery(users, lmtp, submission=submission),
            hostname=hostname,
            ident="ESMTP",
            data_size_limit=MESSAGE_BYTES,
            enable_SMTPUTF8=True,
            authenticator=Authenticator(users),
            auth_require_tls=False,
            loop=loop,
        )

    servers = [
        await loop.create_server(lambda p=port: protocol(p), sock=listeners[port]) for port in listeners
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


class Authenticator:
    """Compares a login with the users' passwords; addresses are case-insensitive."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users

    def __call__(
        self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, login: object
    ) -> AuthResult:
        if not isinstance(login, LoginPassword):
            return AuthResult(success=False, handled=False)
        password = self._users.get(login.login.decode("utf-8", "replace").lower())
        matches = password is not None and compare_digest(password.encode(), login.password)
        return AuthResult(success=matches, handled=False)


class Delivery:
    """Accepts recipients and puts messages into their mailboxes. `submission`: whether users send here."""

    def __init__(self, users: Mapping[str, str], lmtp: Path, *, submission: bool) -> None:
        self._users = users
        self._domains = {address.partition("@")[2] for address in users}
        self._lmtp = lmtp
        self._submission = submission

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: Sequence[str]
    ) -> str:
        domain = address.lower().rpartition("@")[2]
        if len(envelope.rcpt_tos) >= RECIPIENTS:
            return "452 4.5.3 Too many recipients"
        if domain in self._domains and address.lower() not in self._users:
            return f"550 5.1.1 <{address}>: there is no such user here"
        if domain not in self._domains and not (self._submission or session.authenticated):
            return f"550 5.7.1 <{address}>: relaying denied"
        envelope.rcpt_tos.append(address)
        return "250 2.1.5 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        content = envelope.content if isinstance(envelope.content, bytes) else b""
        if self._submission:
            content = completed(content, server.hostname)
        recipients = {address.lower() for address in envelope.rcpt_tos}.intersection(self._users)
        for recipient in sorted(recipients):
            try:
                await asyncio.to_thread(self._deliver, envelope.mail_from or "", recipient, content)
            except (OSError, smtplib.SMTPException) as error:
                return f"451 4.3.0 Not delivered: {type(error).__name__}"
        return "250 2.0.0 OK: delivered"

    def _deliver(self, sender: str, recipient: str, content: bytes) -> None:
        # A connection for each: smtplib reads one reply to DATA, LMTP sends one for each recipient.
        with smtplib.LMTP(str(self._lmtp), timeout=DELIVERY_SECONDS) as mailboxes:
            mailboxes.sendmail(sender, recipient, content)


def completed(content: bytes, hostname: str) -> bytes:
    """A submitted message with the headers Date and Message-ID (RFC 6409, section 8)."""
    headers = BytesHeaderParser().parsebytes(content)
    missing = ""
    if "Message-ID" not in headers:
        missing += f"Message-ID: {email.utils.make_msgid(domain=hostname)}\r\n"
    if "Date" not in headers:
        missing += f"Date: {email.utils.formatdate(localtime=True)}\r\n"
    return missing.encode() + content
