"""Exchanges of the recorded web: how the plug-in's parts pass them on, and which exchange answers a request.

The server writes a `Configuration` to the addon's stdin, and the addon a `Ready` to its stdout, each as one
line of JSON. The addon ends with its stdin. Every connection to the proxy is the server's and begins with a
line: the token of `Ready`, a space, and a request in JSON. The answer is a line too, `{"error": STR}` if the
request failed, and ends the connection unless it is for a sandbox:

    {"do": "open", ...}                    a `SessionSpec`
    {"do": "connect", "session": ID}       the rest of the connection is the session's sandbox
    {"do": "counts", "episode": ID}        -> `EpisodeCounts`
    {"do": "close", "episode": ID}         as `counts`, and ends the episode's sessions

The proxy connects to public and to named addresses (`public_address`, `named_address`): it runs on the
server's machine, and must not lead to what listens there, or in the networks around it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import operator
import re
import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, cast
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit

Mode = Literal["record", "replay", "replay-or-record"]
Part = Literal["preprocess", "agent", "grader"]
"""Whose requests: each part of a recording answers its own sandbox only."""

MEBIBYTE = 1 << 20
MAX_LINE_BYTES = 1 << 20
"""Of what server and addon send each other."""


@dataclass(frozen=True, slots=True)
class Headers:
    """HTTP headers in their order; a name can occur more than once."""

    items: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str:
        """The first value of a header, empty if there is none. Names are compared without case."""
        return next((value for key, value in self.items if key.lower() == name.lower()), "")


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request as the proxy received it; `url` names the site that it is sent to."""

    method: str
    url: str
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WebResponse:
    """One response. What is recorded has no content encoding."""

    status: int
    reason: str = ""
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Counts:
    """How the requests of an episode were answered.

    `replayed`: from the recording. `recorded`: by the site, and stored. `passed`: by the site, and not
    stored, because the response was too large, a stream, or a temporary failure. `missed`: by an error,
    because the recording has no answer, or the site could not be reached.
    """

    replayed: int = 0
    recorded: int = 0
    passed: int = 0
    missed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def requests(self) -> int:
        """Their number."""
        return sum(astuple(self))


def decoded_body(body: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """A body without its content encoding; None if it is longer than the limit, or cannot be decoded."""
    encoding = encoding.strip().lower()
    if not body or encoding in ("", "identity"):
        return body if len(body) <= max_bytes else None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return None
    # `deflate` should have zlib's header, but is sent without it too.
    raw_deflate = encoding == "deflate" and body[0] & 0x0F != zlib.DEFLATED
    decoded = b""
    try:
        while body:
            decoder = zlib.decompressobj(-zlib.MAX_WBITS if raw_deflate else zlib.MAX_WBITS | 32)
            decoded += decoder.decompress(body, max_bytes - len(decoded) + 1)
            if len(decoded) > max_bytes or not decoder.eof:
                return None
            body = decoder.unused_data.lstrip(b"\0")
    except zlib.error:
        return None
    return decoded


Listener = Literal["proxy", "http", "https"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the addon has to know of the server's settings."""

    addresses: Addresses
    max_response_bytes: int
    max_recording_bytes: int
    request_seconds: float = 120.0
    """How long a sandbox may take to send a request, and how long it may send nothing on a connection."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the proxy listens: for clients with a proxy setting, and for clients that were led there by name.

    `authority` is the certificate of its authority (PEM), `token` begins each connection.
    """

    listeners: Mapping[Listener, tuple[str, int]]
    authority: str
    token: str


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """One sandbox of an episode. `recording`: path of a file that exists."""

    session: str
    episode: str
    part: Part
    mode: Mode
    recording: str


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """`problem`: why something was not recorded, empty if nothing failed."""

    counts: Counts
    problem: str = ""


Addresses = Mapping[str, tuple[str, int | None]]
"""Addresses that an operator has named, by host. A host with a port is for requests to that port."""

BLOCKED_PORTS = frozenset({22, 23, 25, 110, 143, 465, 587, 993, 995})
"""Ports of services that are not web sites; HTTP sent to a mail server can send mail."""
MAX_SHOWN = 200

_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:]*)(?::\d*)?")
_NAME = re.compile(r"[0-9a-z_-]+(?:\.[0-9a-z_-]+)*")


class RefusedTargetError(Exception):
    """The proxy does not connect there; the message says why and what to do."""


def named_address(addresses: Addresses, host: str, port: int) -> tuple[str, int] | None:
    """The address that an operator has named for a host, None if there is none."""
    name = host.lower().rstrip(".")
    found = addresses.get(f"{name}:{port}") or addresses.get(name)
    return None if found is None else (found[0], found[1] or port)


def host_name(authority: str) -> str:
    """The host of `HOST[:PORT]` as two of them are compared: ASCII in lower case, without a final dot.

    An IPv6 address has no brackets. Raises RefusedTargetError for what is no name and no address: a resolver
    may accept more characters than that, and an address with them would be read as another host's.
    """
    match = _AUTHORITY.fullmatch(authority)
    host = "" if match is None else match["host"].rstrip(".")
    with suppress(ValueError):
        if host.startswith("["):
            return str(ipaddress.IPv6Address(host[1:-1]))
        host = host.encode("idna").decode("ascii").lower()
        if _NAME.fullmatch(host):
            return host
    raise RefusedTargetError(f"{authority[:MAX_SHOWN]!r} is not the name of a host")


def check_port(port: int) -> None:
    """Raises RefusedTargetError for the port of a service that is not a web site."""
    if port in BLOCKED_PORTS:
        raise RefusedTargetError(f"port {port} is not that of a web site")


def public_address(host: str, addresses: list[str]) -> str:
    """The first of a host's addresses, all of which have to be public. Raises RefusedTargetError."""
    # All of them: a name with one private address is an attempt to reach it.
    for address in addresses:
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if not found.is_global or found.is_multicast:
            raise RefusedTargetError(
                f"{host} has the address {address}, which is not public: if sandboxes may reach it, start "
                f"the server with --web-address {host}={address}"
            )
    if not addresses:
        raise RefusedTargetError(f"{host} has no address")
    return addresses[0]


def parse_addresses(texts: tuple[str, ...]) -> Addresses:
    """Read `HOST=ADDRESS`. Both can have a port; an IPv6 address then is in brackets.

    Raises ValueError with a sentence for any other text.
    """
    parsed: dict[str, tuple[str, int | None]] = {}
    for text in texts:
        host, _, target = text.partition("=")
        bracketed = target if target.startswith("[") or target.count(":") < 2 else f"[{target}]"
        address, port = "", 0
        with suppress(ValueError):
            parts = urlsplit(f"//{bracketed}")
            address, port = str(ipaddress.ip_address(parts.hostname or "")), parts.port
        if not host or not address or port == 0:
            raise ValueError(f"--web-address {text}: expected HOST=ADDRESS, both with an optional :PORT")
        parsed[host.lower().rstrip(".")] = address, port
    return parsed


REDACTED = "REDACTED"
MIN_SECRET_CHARACTERS = 8
"""Shorter values are not searched for in responses: they would match by chance."""
MAX_SEARCHED_BYTES = 4 << 30
"""The length of a response times the credentials that are searched for in it: some 3 s. A sandbox can send
20,000 cookies to a site that answers with 64 MiB."""
MAX_PARSED_BYTES = 64 << 10
"""Longer forms and JSON bodies are compared byte by byte: while they are parsed, nothing else runs."""
MAX_URL_CHARACTERS = 8192
MAX_HEADER_BYTES = 64 << 10
DEFAULT_PORTS = {"http": 80, "https": 443}

_SECRET_NAME = re.compile(
    r"""(?ix) ^(?:x-|\$)? (?:
        (?:\w+[-_])? api[-_]?key | (?:\w+[-_])? (?:access|auth|id|refresh|bearer|security)[-_]?token
      | key | token | auth | (?:proxy-)? authorization | (?:client[-_]?)? secret | secret[-_]?key
      | password | passwd | pwd | jwt | sid | session(?:[-_]?id)? | cookie
      | sig | signature | amz-(?:signature|credential|security-token) | goog-(?:signature|credential)
      | awsaccesskeyid | private[-_]?token | csrf[-_]?token | xsrf[-_]?token
    )$"""
)
_TOKEN_MEMBERS = re.compile(
    rb'("(?:access_token|refresh_token|id_token|client_secret|api_key|password)"\s*:\s*")(?:[^"\\]|\\.)*+(")'
)
"""Possessive: each character that can be given back takes 150 bytes."""
_CACHE_BUSTER = re.compile(r"_|cb|cache_?bust(?:er)?|nocache")
_FRACTION = re.compile(r"0\.\d{14,}")
"""As JavaScript prints nearly all numbers of `Math.random`, and people write none."""
_TIME = re.compile(r"(\d{10})(\d{3}|\d{6}|\.\d+)?")
"""Unix time in seconds, milliseconds or microseconds."""
_NOW_SECONDS = 300
"""A time so close to the request's own was read from a clock for it. A page may be open for minutes."""
_DROPPED_HEADERS = frozenset(
    {
        *(
            "authorization",
            "cookie",
            "set-cookie",
            "set-cookie2",
            "proxy-authorization",
            "proxy-authenticate",
        ),
        *("connection", "keep-alive", "proxy-connection", "trailer", "transfer-encoding", "upgrade"),
        *("alt-svc", "clear-site-data", "content-encoding", "nel", "public-key-pins", "report-to"),
    }
)
"""Headers of a response that are not stored: credentials, and what concerns one connection only."""
_ADDRESS_HEADERS = frozenset({"location", "content-location", "link", "refresh"})


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What identifies a request in a recording. `url` is redacted; `variant`: of the response."""

    digest: str
    variant: str
    method: str
    url: str


def request_key(request: WebRequest) -> RequestKey:
    """The key of a request."""
    method, url = request.method.upper(), normal_url(request.url)
    total = hashlib.sha256()
    body = _comparable_body(request)
    for part in (method.encode(), url.encode("utf-8", "surrogateescape"), *body):
        total.update(len(part).to_bytes(8, "big") + part)
    accept = ",".join(sorted(part.strip().lower() for part in request.headers.get("accept").split(",")))
    variant = hashlib.sha256(f"{accept}\n{request.headers.get('range')}".encode("utf-8", "replace"))
    return RequestKey(total.hexdigest()[:32], variant.hexdigest()[:16], method, url[:MAX_URL_CHARACTERS])


def normal_url(url: str) -> str:
    """The address without user, fragment, default port and cache busters, with credentials redacted.

    Query parameters are sorted by their names; parameters of the same name keep their order.
    """
    parts = urlsplit(url)
    pairs = [
        (name, REDACTED if is_secret_name(name) and value else value)
        for name, value in parse_qsl(parts.query, keep_blank_values=True, max_num_fields=None)
        if not _is_cache_buster(name, value)
    ]
    pairs.sort(key=lambda pair: pair[0])
    return urlunsplit((parts.scheme.lower(), _normal_host(parts), parts.path or "/", urlencode(pairs), ""))


def _is_cache_buster(name: str, value: str) -> bool:
    """Whether a query parameter only distinguishes repeated requests."""
    if _CACHE_BUSTER.fullmatch(name):
        return value.replace(".", "").isdecimal()
    moment = _TIME.fullmatch(value)
    is_now = moment is not None and abs(int(moment[1]) - time.time()) < _NOW_SECONDS
    return is_now or _FRACTION.fullmatch(value) is not None


def is_secret_name(name: str) -> bool:
    """Whether a query parameter, a header or a field of this name carries a credential."""
    return _SECRET_NAME.match(name.strip()) is not None


def storable(request: WebRequest, response: WebResponse) -> WebResponse | None:
    """The response as it may be stored: without cookies and tokens, and without the request's credentials.

    None if there are too many credentials to be searched for.
    """
    secrets = _secrets_of(request, response)
    if len(secrets) * (len(response.body) + MAX_HEADER_BYTES) > MAX_SEARCHED_BYTES:
        return None
    headers: list[tuple[str, str]] = []
    size = 0
    for name, value in response.headers.items:
        lowered = name.lower()
        if lowered in _DROPPED_HEADERS or is_secret_name(lowered):
            continue
        if lowered == "content-length" and request.method.upper() != "HEAD":
            continue  # the stored body has another length
        size += len(name) + len(value)
        if size > MAX_HEADER_BYTES:
            break
        cleaned = _without(value.encode("utf-8", "surrogateescape"), secrets)
        text = cleaned.decode("utf-8", "surrogateescape")
        headers.append((name, redacted_addresses(text) if lowered in _ADDRESS_HEADERS else text))
    body = _without(response.body, secrets)
    if "json" in response.headers.get("content-type").lower():
        body = _TOKEN_MEMBERS.sub(rb"\1REDACTED\2", body)
    return WebResponse(response.status, response.reason, Headers(tuple(headers)), body)


def redacted_addresses(text: str) -> str:
    """A header's value with the credentials in its address replaced."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}={REDACTED}" if is_secret_name(match[2]) else match[0]

    text = re.sub(r"(//)[^/?#\s@]+@", r"\1", text)
    # Up to the next sign that begins a name: a header of 64 KiB question marks took a minute.
    return re.sub(r"([?&;])([^?=&;#\s]+)=[^&;#>\s]*", replace, text)


def _normal_host(parts: SplitResult) -> str:
    host = (parts.hostname or "").rstrip(".").lower()
    if ":" in host:
        host = f"[{host}]"
    try:
        port = parts.port
    except ValueError:
        return parts.netloc.rpartition("@")[2].lower()
    return host if port in (None, DEFAULT_PORTS.get(parts.scheme.lower())) else f"{host}:{port}"


def _comparable_body(request: WebRequest) -> tuple[bytes, ...]:
    """The body in a spelling that does not vary, and how a site reads it."""
    content_type, body = request.headers.get("content-type"), request.body
    if not body:
        return (b"",)
    kind = content_type.partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding").strip().lower()
    if encoding or len(body) > MAX_PARSED_BYTES:
        pass
    elif kind == "application/x-www-form-urlencoded":
        pairs = parse_qsl(body.decode("utf-8", "surrogateescape"), keep_blank_values=True)
        redacted = sorted((name, REDACTED if is_secret_name(name) else value) for name, value in pairs)
        body = "&".join(
            f"{quote(name)}={quote(value, errors='replace')}" for name, value in redacted
        ).encode()
    elif kind == "application/json" or kind.endswith("+json"):
        with suppress(ValueError, RecursionError):
            body = json.dumps(_redacted(json.loads(body)), sort_keys=True).encode()
    if kind.startswith("multipart/") and (match := re.search(r'boundary="?([^";,]+)', content_type)):
        # Clients choose a boundary at random.
        body = body.replace(match[1].encode("utf-8", "surrogateescape"), b"boundary")
    return (body, kind.encode("utf-8", "surrogateescape"), encoding.encode("utf-8", "surrogateescape"))


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        return {
            name: REDACTED if is_secret_name(name) and isinstance(member, str) else _redacted(member)
            for name, member in members
        }
    if isinstance(value, list):
        return [_redacted(item) for item in cast("list[Any]", value)]
    return value


def _secrets_of(request: WebRequest, response: WebResponse) -> Collection[bytes]:
    """The values of credentials in a request, and of cookies that its response sets."""
    values: list[str] = []
    for name, value in request.headers.items:
        if name.lower() == "cookie":
            values += _cookie_values(value.split(";"))
        elif is_secret_name(name):
            values += [value, value.partition(" ")[2]]
    query = parse_qsl(urlsplit(request.url).query)
    values += [value for name, value in query if is_secret_name(name)]
    cookies = [value for name, value in response.headers.items if name.lower() == "set-cookie"]
    values += _cookie_values(cookie.partition(";")[0] for cookie in cookies)
    return {
        value.strip().encode("utf-8", "surrogateescape")
        for value in values
        if len(value.strip()) >= MIN_SECRET_CHARACTERS
    }


def _cookie_values(cookies: Iterable[str]) -> list[str]:
    return [cookie.partition("=")[2] for cookie in cookies]


def _without(data: bytes, secrets: Collection[bytes]) -> bytes:
    for secret in sorted(secrets, key=len, reverse=True):
        data = data.replace(secret, REDACTED.encode())
    return data
