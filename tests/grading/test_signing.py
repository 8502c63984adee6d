"""Whose word a verdict is, and that nobody else's passes for it."""

from __future__ import annotations

import json
import stat
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.grading.canonical import canonical
from decathlon_mcp.grading.signing import BadSignatureError, PublicKey, Signer
from decathlon_mcp.grading.verdict import Verdict, verdict_of, verdict_without_grading
from tests.grading.scene import attempt_of


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.at(tmp_path / "state")


def scored(**fields: Any) -> Verdict:
    return verdict_of(attempt_of(), status="scored", success=True, reward=1.0, **fields)


def test_a_signed_verdict_verifies_with_the_public_half_alone(signer: Signer) -> None:
    told = signer.sign(scored(evaluator_output="42 — «done»\n")).to_json()
    PublicKey.read(json.dumps(signer.public.to_json()).encode()).check(told)
    assert told["signature"]["key"] == signer.public.id
    assert Verdict.model_validate(told).reward == 1.0


def test_a_verdict_without_a_score_is_signed_too_and_has_no_reward(signer: Signer) -> None:
    told = signer.sign(verdict_without_grading(attempt_of(), status="timeout", detail="late")).to_json()
    signer.public.check(told)
    assert not {"reward", "success"} & told.keys()


def test_being_parsed_and_written_by_another_language_does_not_break_it(signer: Signer) -> None:
    """JavaScript writes 1.0 as 1, and keys in any order; none of that is a change."""
    told = signer.sign(scored(metrics={"tiny": 1e-7, "huge": 1e21, "half": 0.5})).to_json()
    rewritten = {name: value if name != "reward" else 1 for name, value in reversed(told.items())}
    signer.public.check(json.loads(json.dumps(rewritten, ensure_ascii=True, indent=4)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": 0.5}, "changed, or forged"),
        ({"episode": "another"}, "changed, or forged"),
        ({"extra": 1}, "changed, or forged"),
        ({"detail": float("nan")}, "changed, or forged"),
        ({"signature": None}, "not signed"),
        ({"signature": {}}, "not signed with Ed25519"),
        ({"signature": {"algorithm": "none"}}, "not signed with Ed25519"),
    ],
)
def test_one_that_was_changed_does_not(signer: Signer, change: dict[str, Any], words: str) -> None:
    told = {**signer.sign(scored()).to_json(), **change}
    with pytest.raises(BadSignatureError, match=words):
        signer.public.check(told)


def test_nor_one_without_a_key_it_was_signed_with(signer: Signer) -> None:
    told = signer.sign(scored()).to_json()
    del told["reward"]
    with pytest.raises(BadSignatureError, match="changed, or forged"):
        signer.public.check(told)


def test_another_servers_verdict_is_told_from_a_forged_one(signer: Signer, tmp_path: Path) -> None:
    other = Signer.at(tmp_path / "other")
    told = other.sign(scored()).to_json()
    with pytest.raises(BadSignatureError, match=f"another key, {other.public.id}"):
        signer.public.check(told)
    told["signature"]["key"] = signer.public.id
    with pytest.raises(BadSignatureError, match="changed, or forged"):
        signer.public.check(told)


@pytest.mark.parametrize("value", ["", "AAAA", "not base64", None, 7])
def test_a_signature_of_no_form_is_a_bad_one(signer: Signer, value: Any) -> None:
    told = signer.sign(scored()).to_json()
    told["signature"]["value"] = value
    with pytest.raises(BadSignatureError):
        signer.public.check(told)


def test_signing_twice_covers_the_verdict_and_not_its_first_signature(signer: Signer) -> None:
    once = signer.sign(scored())
    assert signer.sign(once) == once


def test_the_key_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    first, second = Signer.at(tmp_path / "state"), Signer.at(tmp_path / "state")
    assert first.public == second.public
    file = tmp_path / "state" / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["key"]


def test_servers_that_start_at_once_make_one_key(tmp_path: Path) -> None:
    together, keys = threading.Barrier(8), list[PublicKey]()

    def start() -> None:
        together.wait()
        keys.append(Signer.at(tmp_path).public)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Signer.at(tmp_path)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        Signer.at(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"]
)
def test_a_file_that_is_no_key_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(SettingsError, match="is not an Ed25519 key"):
        Signer.at(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="--state: the key"):
        Signer.at(tmp_path / "file")


def test_a_public_key_is_read_from_all_its_spellings(signer: Signer) -> None:
    raw = signer.public.raw
    pem = Ed25519PublicKey.from_public_bytes(raw).public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    for said in (raw.hex(), raw.hex().upper(), b64encode(raw).decode() + "\n", pem.decode()):
        assert PublicKey.read(said.encode()) == signer.public


@pytest.mark.parametrize("said", ["", "zz", "{", "{}", "[]", "AAAA", "-----BEGIN PUBLIC KEY-----", "é" * 44])
def test_what_is_no_public_key_is_none(said: str) -> None:
    with pytest.raises(ValueError, match="not an Ed25519 public key"):
        PublicKey.read(said.encode())


def test_a_private_key_is_no_public_one() -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(ValueError, match="not an Ed25519 public key"):
        PublicKey.read(pem)


@pytest.mark.parametrize(
    ("number", "written"),
    [  # RFC 8785, appendix B
        (0.0, "0"),
        (-0.0, "0"),
        (5e-324, "5e-324"),
        (-1.7976931348623157e308, "-1.7976931348623157e+308"),
        (9007199254740992, "9007199254740992"),
        (295147905179352830000.0, "295147905179352830000"),
        (1e23, "1e+23"),
        (9.999999999999997e22, "9.999999999999997e+22"),
        (0.000001, "0.000001"),
        (9.999999999999997e-7, "9.999999999999997e-7"),
        (333333333.3333332, "333333333.3333332"),
        (999999999999999700000.0, "999999999999999700000"),
        (1e21, "1e+21"),
        (-0.0000033333333333333333, "-0.0000033333333333333333"),
        (1424953923781206.2, "1424953923781206.2"),
    ],
)
def test_numbers_are_written_as_the_rfc_has_them(number: float, written: str) -> None:
    assert canonical(number).decode() == written


def test_keys_are_sorted_as_the_rfc_has_them() -> None:
    """RFC 8785, 3.2.3: by UTF-16's units, so that an emoji goes before a Hebrew presentation form."""
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    assert list(json.loads(canonical(dict.fromkeys(names)))) == [
        "\r",
        "1",
        "\u0080",
        "\u00f6",
        "\u20ac",
        "\U0001f600",
        "\ufb33",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, "\ud800", {"\udc00": 1}, b"", {1}])
def test_what_json_cannot_hold_alike_everywhere_has_no_form(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical(value)
