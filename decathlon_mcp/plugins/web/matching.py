"""Which requests are the same, and what of them may be stored.

Two requests are the same if method, address and body are, apart from credentials, cache busters, the order of
query parameters, and the spelling of forms and JSON. Scripts of pages also put the time, or a random
fraction, into parameters of any name: these count as cache busters too. Responses to the same request can
differ by the headers `Accept` and `Range`: these are a request's variant.

Nothing here stores a credential. Request headers and bodies are never stored, only digests of what
distinguishes requests; credentials in an address are replaced by `REDACTED`, before anything is compared, so
that a recording answers a client that has other credentials, or none.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit

from decathlon_mcp.plugins.web.exchanges import Headers, WebRequest, WebResponse

REDACTED = "REDACTED"
MIN_SECRET_CHARACTERS = 8
"""Shorter values are not searched for in responses: they would match by chance."""
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
    rb'("(?:access_token|refresh_token|id_token|client_secret|api_key|password)"\s*:\s*")(?:[^"\\]|\\.)*(")'
)
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
    """What identifies a request in a recording. `url` is redacted; `variant` is that of the response."""

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

    Query parameters are sorted by their names; those of the same name keep their order.
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
    """Whether a query parameter only tells a request from an earlier one."""
    if _CACHE_BUSTER.fullmatch(name):
        return value.replace(".", "").isdecimal()
    moment = _TIME.fullmatch(value)
    is_now = moment is not None and abs(int(moment[1]) - time.time()) < _NOW_SECONDS
    return is_now or _FRACTION.fullmatch(value) is not None


def is_secret_name(name: str) -> bool:
    """Whether a query parameter, a header or a field of this name carries a credential."""
    return _SECRET_NAME.match(name.strip()) is not None


def storable(request: WebRequest, response: WebResponse) -> WebResponse:
    """The response as it may be stored: without cookies and tokens, and without the request's credentials."""
    secrets = _secrets_of(request, response)
    headers: list[tuple[str, str]] = []
    size = 0
    for name, value in response.headers.items:
        lowered = name.lower()
        if lowered in _DROPPED_HEADERS or is_secret_name(lowered):
            continue
        if lowered == "content-length" and request.method.upper() != "HEAD":
            continue  # that of the body as it is stored
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
    return re.sub(r"([?&;])([^=&;#\s]+)=[^&;#>\s]*", replace, text)


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
