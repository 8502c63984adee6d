"""Signatures of verdicts: what verifies and what does not."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import Outcome, Verdict, build_verdict, verdict_without_grading
from decathlon_mcp.plugins.credentials import BadSignatureError, check, read_key
from tests.grading.support import make_attempt

FIXED_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
FIXED_VERDICT = Path(__file__).parent / "signed_verdict.json"


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.at(tmp_path / "state")


def scored(**fields: Any) -> Verdict:
    return build_verdict(make_attempt(), Outcome(status="scored", success=True, reward=1.0, **fields))


def test_signed_verdict_verifies_with_the_public_key_alone(signer: Signer) -> None:
    verdict = signer.sign(scored(output="42 — «done»\n")).to_json()
    check(read_key(json.dumps(signer.public.to_json()).encode()), verdict)
    assert verdict["signature"]["key"] == signer.public.id
    assert Verdict.model_validate(verdict).reward == 1.0


def test_verdict_without_a_score_is_signed_too(signer: Signer) -> None:
    unscored = verdict_without_grading(make_attempt(), status="sandbox_lost", detail="late")
    verdict = signer.sign(unscored).to_json()
    check(signer.public, verdict)
    assert not {"reward", "success"} & verdict.keys()


def test_verdict_signed_by_an_earlier_release_still_verifies() -> None:
    """The file was signed by the hand-written canonical form that preceded `rfc8785`.

    It has numbers with exponents, escapes, and keys whose order differs between UTF-8 and UTF-16.
    """
    verdict = json.loads(FIXED_VERDICT.read_text("utf-8"))
    check(Signer(FIXED_KEY).public, verdict)


def test_verdict_rewritten_by_another_language_verifies(signer: Signer) -> None:
    """JavaScript writes 1.0 as 1, and parsers may reorder keys."""
    verdict = signer.sign(scored(metrics={"tiny": 1e-7, "huge": 2.0**53 - 1, "half": 0.5})).to_json()
    whole: dict[str, Any] = {"reward": 1, "metrics": {**verdict["metrics"], "huge": 2**53 - 1}}
    rewritten = {name: whole.get(name, value) for name, value in reversed(verdict.items())}
    check(signer.public, json.loads(json.dumps(rewritten, ensure_ascii=True, indent=4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": 0.5}, "changed, or the signature is forged"),
        ({"episode": "another"}, "changed, or the signature is forged"),
        ({"extra": 1}, "changed, or the signature is forged"),
        ({"signature": None}, "not signed"),
        ({"signature": {}}, "not signed with Ed25519"),
        ({"signature": {"algorithm": "none"}}, "not signed with Ed25519"),
    ],
)
def test_changed_verdict_is_rejected(signer: Signer, change: dict[str, Any], message: str) -> None:
    verdict = {**signer.sign(scored()).to_json(), **change}
    with pytest.raises(BadSignatureError, match=message):
        check(signer.public, verdict)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_value_without_a_canonical_form_is_rejected(signer: Signer) -> None:
    for value in (float("nan"), 2**53, 10**400, "\ud800", {"\udc00": 1}, {1: 1}, b"", nested(100_000)):
        verdict = {**signer.sign(scored()).to_json(), "detail": value}
        with pytest.raises(BadSignatureError, match="changed, or the signature is forged"):
            check(signer.public, verdict)


def test_error_distinguishes_another_key_from_a_forged_signature(signer: Signer, tmp_path: Path) -> None:
    other = Signer.at(tmp_path / "other")
    verdict = other.sign(scored()).to_json()
    with pytest.raises(BadSignatureError, match=f"another key, {other.public.id}"):
        check(signer.public, verdict)
    verdict["signature"]["key"] = signer.public.id
    with pytest.raises(BadSignatureError, match="changed, or the signature is forged"):
        check(signer.public, verdict)


def test_signature_of_another_form_is_rejected(signer: Signer) -> None:
    verdict = signer.sign(scored()).to_json()
    right = dict(verdict["signature"])
    text = right["value"]
    # Base64 of 64 bytes ends with four bits that decoders ignore.
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    neighbour = f"{text[:-3]}{alphabet[alphabet.index(text[-3]) ^ 1]}=="
    # RFC 8032, 5.1.7: the scalar must be less than the order of the group.
    value = b64decode(text)
    scalar = int.from_bytes(value[32:], "little") + 2**252 + 27742317777372353535851937790883648493
    second = b64encode(value[:32] + scalar.to_bytes(32, "little")).decode()
    forms: list[tuple[str, Any]] = [
        *(("value", wrong) for wrong in ("", "AAAA", "not base64", None, 7, [text], f"{text}\n")),
        *(("value", neighbour), ("value", second)),
        *(("algorithm", "HS256"), ("algorithm", ["Ed25519"]), ("key", None), ("key", 1)),
    ]
    for name, wrong in forms:
        verdict["signature"] = {**right, name: wrong}
        with pytest.raises(BadSignatureError):
            check(signer.public, verdict)
    verdict["signature"] = right
    check(signer.public, verdict)


def test_member_added_to_the_signature_is_rejected(signer: Signer) -> None:
    """The signature covers all of the verdict but its own member."""
    verdict = signer.sign(scored()).to_json()
    verdict["signature"]["reward"] = 2.0
    with pytest.raises(BadSignatureError, match="has unsigned members: reward"):
        check(signer.public, verdict)


def test_public_key_is_read_from_every_encoding(signer: Signer) -> None:
    raw = signer.public.raw
    for text in (raw.hex(), raw.hex().upper(), b64encode(raw).decode() + "\n"):
        assert read_key(text.encode()) == signer.public


def test_anything_else_is_no_public_key() -> None:
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    others = [text.encode() for text in ("", "{", "[]", "AAAA", "-----BEGIN PUBLIC KEY-----", "é" * 44)]
    for other in (*others, private):
        with pytest.raises(ValueError, match="not an Ed25519 public key"):
            read_key(other)
