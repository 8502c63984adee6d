"""Token files and allowed host names."""

from __future__ import annotations

from pathlib import Path

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.authentication import AllowedHosts, Refused, Tokens, new_token
from decathlon_mcp.http.listening import hosts_for
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import McpError


def refusal(hosts: AllowedHosts, method: str, headers: list[tuple[bytes, bytes]]) -> Refused | None:
    return hosts.refusal(method, Headers(headers))


def test_a_new_token_is_accepted_with_its_name_and_role(tmp_path: Path) -> None:
    secret, line = new_token("ada", "controller")
    assert secret not in line
    file = tmp_path / "tokens"
    file.write_text(f"# people\n\n{line}\n")
    tokens = Tokens.read(file)
    principal = tokens.require(f"Bearer {secret}")
    assert (principal.token, principal.role) == ("ada", "controller")
    for header in (None, "", secret, f"Basic {secret}", "Bearer nonsense", f"Bearer {secret}x"):
        with pytest.raises(McpError, match="token"):
            tokens.require(header)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ada 12 player", "1: expected NAME SHA256 ROLE"),
        (f"# one\nada {'0' * 64} king", "2: expected NAME SHA256 ROLE"),
        ("# nobody\n", "there is no token in it"),
    ],
)
def test_an_invalid_token_file_is_an_error_naming_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        Tokens.read(file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "box.example"])
def test_listening_beyond_loopback_requires_tokens(host: str) -> None:
    with pytest.raises(SettingsError, match="--tokens FILE"):
        hosts_for(host, (), Tokens())


def test_allowed_hosts_are_loopback_the_host_and_the_configured_names(tmp_path: Path) -> None:
    _, line = new_token("ada", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    loopback = ("127.0.0.1", "localhost", "[::1]", "decathlon.localhost")
    assert hosts_for("0.0.0.0", ("box.example",), tokens).names == (*loopback, "box.example")
    assert hosts_for("192.0.2.7", (), tokens).names == (*loopback, "192.0.2.7")
    hosts = hosts_for("127.0.0.1", (), tokens, public_url="https://box.example:8443/decathlon/")
    assert hosts.answers_to("box.example:8443")
    assert not hosts.answers_to("other.example:8443")


HOSTS = (
    *("localhost", "LocalHost.:8765", "127.0.0.1:1", "[::1]", "[::1]:8765", "[0:0:0:0:0:0:0:1]:8765"),
    *("box.example", "BOX.example.:443", "[2001:DB8::7]:1", "port.example:81"),
)
OTHERS = (
    *("port.example", "port.example:82", "", ".", "evil.example", "localhost.evil.example", "localhost/"),
    *("evil.example:8765@localhost", "localhost:65536", "localhost:80:80", "localhost:x", "::1", "[::2]"),
    *("localhost, evil.example", "[::1", "[localhost]", "127.0.0.2", "127.1", "192.0.2.7"),
)


def test_a_host_is_compared_without_case_final_dot_and_port_and_there_is_one() -> None:
    hosts = AllowedHosts((*AllowedHosts().names, "Box.example", "[2001:db8:0::7]", "port.example:81"))
    for host in (*HOSTS, *OTHERS):
        assert (refusal(hosts, "GET", [(b"host", host.encode())]) is None) is (host in HOSTS), host
    for headers in ([], [(b"host", b"localhost")] * 2, [(b"host", b"localhost"), (b"host", b"evil.example")]):
        refused = refusal(AllowedHosts(), "GET", headers)
        assert refused is not None
        assert refused.status == 421


@pytest.mark.parametrize("address", ["192.0.2.7:8000", "[2001:db8::7]"])
def test_any_address_can_stand_for_the_name_of_a_cluster(address: str) -> None:
    hosts = AllowedHosts(any_address=True)
    assert refusal(hosts, "GET", [(b"host", address.encode())]) is None
    assert refusal(hosts, "GET", [(b"host", b"evil.example")]) is not None
    assert (
        refusal(hosts, "GET", [(b"host", address.encode()), (b"origin", b"http://evil.example")]) is not None
    )


LOCAL = "localhost:8765"
ORIGINS = {
    LOCAL: (
        *("http://localhost:8765", "http://LOCALHOST.:8765", "https://localhost:8765", "http://page.example"),
        *("http://page.example:80", "vscode-webview://panel"),
    ),
    "localhost": ("http://localhost", "http://localhost:80", "https://localhost"),
    "localhost:80": ("http://localhost",),
    "[::1]:8765": ("http://[::1]:8765",),
}
FOREIGN = {
    LOCAL: (
        *("https://page.example", "http://page.example:81", "http://localhost:6274", "http://localhost"),
        *("http://127.0.0.1:8765", "null", "", "http://", "http://evil.example", "http://localhost:8765/"),
        *("http://localhost:8765@evil.example", "http://localhost:8765.evil.example", "file://"),
        "http://localhost:8765 http://evil.example",
    ),
    "localhost": ("http://localhost:8765",),
    "[::1]:8765": ("http://localhost:8765",),
}


@pytest.mark.parametrize("is_accepted", [True, False])
def test_an_origin_is_the_servers_own_or_an_allowed_one(*, is_accepted: bool) -> None:
    hosts = hosts_for("127.0.0.1", (), Tokens(), ("HTTP://page.example.:80", "vscode-webview://panel"))
    for host, origins in (ORIGINS if is_accepted else FOREIGN).items():
        for origin in origins:
            headers = [(b"host", host.encode()), (b"origin", origin.encode())]
            assert (refusal(hosts, "DELETE", headers) is None) is is_accepted, (host, origin)
            # A second one is not looked over.
            second = (b"origin", b"http://evil.example")
            assert refusal(hosts, "DELETE", [*headers, second]) is not None


JSON = ("application/json", "Application/JSON; charset=utf-8")
OTHER_TYPES = (
    *("", "text/plain", "text/plain; application/json", "application/jsonp", "application/json, text/plain"),
    "application/x-www-form-urlencoded",
)


def test_only_a_post_of_json_is_accepted() -> None:
    for content_type in (*JSON, *OTHER_TYPES):
        headers = [(b"host", b"localhost"), (b"content-type", content_type.encode())]
        assert (refusal(AllowedHosts(), "POST", headers) is None) is (content_type in JSON)
        assert refusal(AllowedHosts(), "GET", headers) is None


@pytest.mark.parametrize("origin", ["*", "null", "localhost", "http://*", "http://a/b", "http://a:99999"])
def test_what_is_no_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(SettingsError, match="expected SCHEME://HOST"):
        hosts_for("127.0.0.1", (), Tokens(), (origin,))
