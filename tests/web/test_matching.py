"""Which requests a recording takes for the same, and what it never stores."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from decathlon_mcp.plugins.web.exchanges import (
    Headers,
    WebRequest,
    WebResponse,
    is_secret_name,
    normal_url,
    request_key,
    storable,
)

SECRET = "abcdefgh12345678"
HSTS = ("Strict-Transport-Security", "max-age=86400")
"""A browser that has it asks for other addresses."""


def get(url: str, *headers: tuple[str, str]) -> WebRequest:
    return WebRequest("GET", url, Headers(headers))


def stored_of(request: WebRequest, response: WebResponse) -> WebResponse:
    stored = storable(request, response)
    assert stored is not None
    return stored


def post(body: bytes, content_type: str) -> WebRequest:
    return WebRequest("POST", "https://a.example/", Headers((("Content-Type", content_type),)), body)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://A.example.:80", "http://a.example/"),
        ("https://a.example:443/p?b=2&a=1#top", "https://a.example/p?a=1&b=2"),
        ("https://user:word@a.example/", "https://a.example/"),
        ("https://a.example/?q=x&_=1700000000123", "https://a.example/?q=x"),
        (f"https://a.example/?api_key={SECRET}", "https://a.example/?api_key=XX"),
        ("https://a.example/?q=a%20b", "https://a.example/?q=a+b"),
    ],
)
def test_spellings_of_an_address_are_the_same_request(one: str, other: str) -> None:
    assert request_key(get(one)) == request_key(get(other))


def test_times_and_fractions_that_a_script_adds_do_not_distinguish_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    plain = request_key(get("https://a.example/p?q=x"))
    for added in ("at=1800000000", "t=1799999940123", "end=1800000060123456", "lot=0.31683706663708666"):
        assert request_key(get(f"https://a.example/p?{added}&q=x")) == plain, added
    for own in (
        "at=1700000000",
        "t=1800000301000",
        "id=18000000001",
        "lat=0.316837",
        "lot=1.31683706663708666",
    ):
        assert request_key(get(f"https://a.example/p?{own}&q=x")).digest != plain.digest, own


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://a.example/", "https://a.example/"),
        ("http://a.example/", "http://a.example:8080/"),
        ("http://a.example/?q=1", "http://a.example/?q=2"),
        ("http://a.example/?q=1&q=2", "http://a.example/?q=2&q=1"),
        ("http://a.example/?_=latest", "http://a.example/"),
        ("http://a.example/A", "http://a.example/a"),
    ],
)
def test_different_addresses_are_different_requests(one: str, other: str) -> None:
    assert request_key(get(one)).digest != request_key(get(other)).digest


@pytest.mark.parametrize(
    ("content_type", "one", "other"),
    [
        ("application/json", b'{"q": "x", "n": 1}', b'{"n":1,"q":"x"}'),
        ("application/json", b'{"q": 1, "token": "a"}', b'{"q": 1, "token": "b"}'),
        ("application/x-www-form-urlencoded", b"q=x&password=1", b"password=2&q=x"),
    ],
)
def test_spellings_of_a_body_are_the_same_request(content_type: str, one: bytes, other: bytes) -> None:
    assert request_key(post(one, content_type)) == request_key(post(other, content_type))


@pytest.mark.parametrize(
    "name",
    ["key", "X-API-KEY", "access_token", "X-Amz-Signature", "Authorization", "password", "sid"],
)
def test_names_of_credentials_are_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["q", "keyword", "author", "pageToken", "signal"])
def test_names_of_other_parameters_are_not(name: str) -> None:
    assert not is_secret_name(name)


def test_a_stored_response_has_no_credential() -> None:
    request = get(
        f"https://a.example/?token={SECRET}1",
        ("Authorization", f"Bearer {SECRET}2"),
        ("Cookie", f"a={SECRET}3; b=1"),
        ("X-Api-Key", f"{SECRET}4"),
    )
    echoed = [f"{SECRET}{number}" for number in range(1, 6)]
    response = WebResponse(
        200,
        "OK",
        Headers(
            (
                ("Content-Type", "application/json"),
                ("Set-Cookie", f"session={SECRET}5; Path=/"),
                ("Location", f"https://me:word@b.example/?sig={SECRET}6&x=1"),
                ("X-Echo", f"{SECRET}2"),
            )
        ),
        json.dumps({"echo": echoed, "access_token": "unknown"}).encode(),
    )
    stored = stored_of(request, response)
    text = repr(stored)
    assert SECRET not in text
    assert "unknown" not in text
    assert stored.headers.get("Location") == "https://b.example/?sig=REDACTED&x=1"
    assert json.loads(stored.body)["echo"] == ["REDACTED"] * 5
    assert stored.headers.get("set-cookie") == ""


def test_headers_of_a_connection_are_not_stored_but_the_length_of_a_head() -> None:
    headers = Headers((("Content-Length", "7"), ("Transfer-Encoding", "chunked"), HSTS))
    response = WebResponse(200, "OK", headers, b"")
    assert stored_of(get("http://a.example/"), response).headers.items == (HSTS,)
    head = WebRequest("HEAD", "http://a.example/")
    assert stored_of(head, response).headers.get("content-length") == "7"


def test_no_response_takes_long_or_much_memory_to_be_stored() -> None:
    """All sandboxes share the proxy's process, whose event loop stands still for each of these."""
    cookies = ("Cookie", "; ".join(f"a={number:08x}" for number in range(10_000)))
    long_text = b'{"access_token":"' + b"a" * (4 << 20)
    headers = Headers((("Content-Type", "application/json"), ("Location", "?" * 60_000)))
    tracemalloc.start()
    started = time.process_time()
    assert storable(get("http://a.example/", cookies), WebResponse(200, "OK", headers, long_text)) is None
    stored = stored_of(get("http://a.example/"), WebResponse(200, "OK", headers, long_text + b'"}'))
    assert time.process_time() - started < 3
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert json.loads(stored.body) == {"access_token": "REDACTED"}
    assert len(stored.headers.get("Location")) == 60_000


@pytest.mark.parametrize("url", ["http://a.example:99999/", "http://[::1]:8080/x", "http://ü.example/ä?ö=ß"])
def test_odd_addresses_have_a_key(url: str) -> None:
    assert normal_url(normal_url(url)) == normal_url(url)
    assert request_key(get(url)) == request_key(get(url))
