"""Which addresses the proxy connects to."""

from __future__ import annotations

import pytest

from decathlon_mcp.plugins.web.exchanges import (
    RefusedTargetError,
    check_port,
    host_name,
    named_address,
    parse_addresses,
    public_address,
)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1%eth0", "fd00::1",
     "::ffff:127.0.0.1", "224.0.0.1", "100.64.0.1"],
)  # fmt: skip
def test_addresses_of_the_machine_and_its_networks_are_refused(address: str) -> None:
    for addresses in ([address], ["93.184.216.34", address]):
        with pytest.raises(RefusedTargetError, match=r"--web-address evil\.example="):
            public_address("evil.example", addresses)


def test_the_first_public_address_is_used() -> None:
    assert public_address("a.example", ["93.184.216.34", "2606:2800:220:1::1"]) == "93.184.216.34"
    with pytest.raises(RefusedTargetError, match="has no address"):
        public_address("a.example", [])


@pytest.mark.parametrize(
    ("authority", "host"),
    [("A.Example.:80", "a.example"), ("[::1]:443", "::1"), ("bücher.example", "xn--bcher-kva.example"),
     ("10.0.0.1", "10.0.0.1"), ("_x.a_b.example", "_x.a_b.example")],
)  # fmt: skip
def test_spellings_of_a_host_are_the_same(authority: str, host: str) -> None:
    assert host_name(authority) == host


@pytest.mark.parametrize(
    "authority", ["", "a b", "a@b", "a/b", "a#b", "a?b", "a\\b", "a%2fb", "[a]", "a:b", ".", "a..b"]
)
def test_what_is_no_name_of_a_host_is_refused(authority: str) -> None:
    with pytest.raises(RefusedTargetError, match="not the name of a host"):
        host_name(authority)


def test_mail_servers_are_refused() -> None:
    check_port(443)
    with pytest.raises(RefusedTargetError, match="port 25"):
        check_port(25)


def test_named_addresses_can_be_for_one_port() -> None:
    texts = ("A.example=10.0.0.1", "b.example:80=127.0.0.1:8080", "c.example=[::1]:9", "d.example=::1")
    addresses = parse_addresses(texts)
    assert named_address(addresses, "a.example.", 443) == ("10.0.0.1", 443)
    assert named_address(addresses, "b.example", 80) == ("127.0.0.1", 8080)
    assert named_address(addresses, "b.example", 443) is None
    assert named_address(addresses, "c.example", 443) == ("::1", 9)
    assert named_address(addresses, "d.example", 80) == ("::1", 80)


@pytest.mark.parametrize(
    "text", ["a.example", "=1.2.3.4", "a.example=", "a=1.2.3.4:x", "a=1.2.3.4:0", "a=b.example"]
)
def test_a_malformed_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"--web-address .*: expected HOST=ADDRESS"):
        parse_addresses((text,))
