"""`token`, `key` and `verify`: access tokens, the key of the server, and signatures of verdicts."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cyclopts import Parameter

from decathlon_mcp.cli.options import StateFolder
from decathlon_mcp.cli.output import print_json
from decathlon_mcp.cli.usage import check_token_name, report
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.grading.signing import PublicKey, Signer, signed_bytes, verdict_digest
from decathlon_mcp.grading.verdict import ALGORITHM, Signature
from decathlon_mcp.http.authentication import new_token
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.keys import KEY_FILE
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.types import HANDLE, JsonObject, as_object, public_id

WELL_KNOWN = "/.well-known/decathlon-key"
MAX_KEY_BYTES = 1 << 16
PUBLIC_ID_CHARACTERS = 16
VERDICT_PATHS = (
    (),
    ("structuredContent",),
    ("result", "structuredContent"),
    ("_meta", "decathlon/verdict"),
    ("verdict",),
)
"""Where the verdict is: the document itself, these members of a stored reply of `evaluate`, or this member of
an episode that `export` wrote, or of a line of a batch's file of `resume`."""
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def token(
    name: Annotated[str, Parameter(name="NAME", validator=check_token_name)],
    /,
    *,
    role: Literal["player", "controller", "admin"] = "player",
    secret: Path | None = None,
) -> int:
    """Create a token for a client of `serve --tokens`.

    The secret is printed on stderr, the token's line for the file of `--tokens` on stdout.

    Parameters
    ----------
    name
        Name of the token's owner.
    role
        `admin` may use every episode, the other roles only their own.
    secret
        New file for the secret, instead of stderr; only its owner can read it.
    """
    value, line = new_token(name, role)
    if secret is None:
        sys.stderr.write(
            f"Secret for {name} (shown once); clients send it as `Authorization: Bearer ...`:\n\n"
            f"  {value}\n\nLine for the --tokens file:\n\n"
        )
        sys.stderr.flush()
    else:
        try:
            descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            report(f"--secret: {secret}: {error.strerror}; name a file that does not exist yet")
            return 2
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{value}\n")
    sys.stdout.write(f"{line}\n")
    return 0


def key(*, state: StateFolder = None) -> int:
    """Print the public key that verdicts are signed with.

    A state folder without a key gets one.
    """
    print_json(Signer.at(state or default_state()).public.to_json(), indent=None)
    return 0


def verify(
    file: Annotated[Path, Parameter(name="FILE")],
    /,
    *files: Annotated[Path, Parameter(name="FILE", show=False)],
    key: Annotated[tuple[str, ...], Parameter(metavar="KEY", negative=(), show_default=False)] = (),
    state: Annotated[Path | None, Parameter(metavar="DIR")] = None,
) -> int:
    """Check the signatures of verdicts.

    The exit status is 0 only if all of them are valid.

    Parameters
    ----------
    file
        A `verdict.json`, a stored reply of `evaluate`, or a file with one verdict or reply per line. Can be
        repeated.
    key
        The server's public key (hexadecimal, base64), a file with it, or the server's URL. Can be repeated.
        [the key in the state folder]
    state
        The server's state folder, which holds the key. [the default one]
    """
    # Each must be signed with one of the keys, be the only one of its episode, and be in the folder of its
    # episode if it is in an episode's folder. An episode's own verdict and each regrading's count apart.
    public_keys = [_read_key(source) for source in key] or [_local_key(state or default_state())]
    places: dict[str, str] = {}
    results = [
        _check(file, where, verdict, public_keys, places)
        for file in (file, *files)
        for where, verdict in _read_verdicts(file)
    ]
    bad = results.count(False)
    if bad:
        report(f"{bad} of {len(results)} do not verify")
    return 1 if bad else 0


class BadSignatureError(Exception):
    """A verdict does not carry a valid signature of the key it is checked with."""


def read_key(encoded: bytes) -> PublicKey:
    """Parse a public key: the JSON that a server publishes, base64, or 64 hexadecimal digits.

    Raises ValueError for anything else.
    """
    text = encoded.decode("utf-8", "replace").strip()
    try:
        if text.startswith("{"):
            text = str((as_object(json.loads(text)) or {}).get("key"))
        raw = bytes.fromhex(text) if _HEX.fullmatch(text) else b64decode(text, validate=True)
    except (ValueError, RecursionError):
        raw = b""
    if len(raw) != 32:
        raise ValueError("not an Ed25519 public key")
    return PublicKey(raw)


def check(key: PublicKey, verdict: JsonObject) -> None:
    """Verify a signed verdict. Raises BadSignatureError if it is not exactly what the key signed."""
    signature = as_object(verdict.get("signature"))
    if signature is None:
        raise BadSignatureError("it is not signed")
    if signature.get("algorithm") != ALGORITHM:
        raise BadSignatureError(f"it is not signed with {ALGORITHM}")
    # The signature does not cover its own member: whatever else is in there, anybody can have added.
    if extra := sorted(signature.keys() - Signature.model_fields.keys()):
        raise BadSignatureError(f"its signature has unsigned members: {', '.join(extra)[:200]}")
    if signature.get("key") != key.id:
        raise BadSignatureError(f"it is signed with another key, {signature.get('key')}, not {key.id}")
    try:
        value = _from_base64(signature.get("value"))
        Ed25519PublicKey.from_public_bytes(key.raw).verify(value, signed_bytes(verdict))
    # Whatever has no canonical form was not signed by anybody. `rfc8785` raises subclasses of ValueError
    # (for NaN, integers outside ±(2**53 - 1), lone surrogates, keys that are no strings) and recurses
    # once a level, so that deep nesting is a RecursionError.
    except (ValueError, RecursionError, InvalidSignature):
        raise BadSignatureError(
            "its signature does not match: the verdict was changed, or the signature is forged"
        ) from None


def _check(
    file: Path,
    where: str,
    verdict: JsonObject | str,
    keys: Iterable[PublicKey],
    places: dict[str, str],
) -> bool:
    """Print whether the verdict is valid; a string is the reason why it could not be read.

    `places`: where earlier verdicts were, by episode, and verdicts of regradings, by digest; the function
    adds a valid verdict.
    """
    problem = verdict if isinstance(verdict, str) else _signature_problem(verdict, keys)
    if not problem and not isinstance(verdict, str):
        episode = str(verdict.get("episode"))
        problem = _folder_problem(file, episode)
        # A verdict that was made again replaces none: both can be in one list, each of them once.
        counted = verdict_digest(verdict) if "regrading" in verdict else episode
        if counted in places:
            problem = f"the verdict of this episode was already counted: {places[counted]}"
        places.setdefault(counted, where)
    summary = "" if isinstance(verdict, str) else f"{_summary(verdict)}: "
    sys.stdout.write(f"{'BAD' if problem else 'ok '} {where}: {summary}{problem or 'signed'}\n")
    return not problem


def _signature_problem(verdict: JsonObject, keys: Iterable[PublicKey]) -> str:
    """Return why no key verifies the signature, or an empty string if one does."""
    problems: dict[str, str] = {}
    for key in keys:
        try:
            check(key, verdict)
        except BadSignatureError as error:
            problems[key.id] = str(error)
        else:
            return ""
    key_id = (as_object(verdict.get("signature")) or {}).get("key")
    return problems.get(str(key_id)) or next(iter(problems.values()))


def _folder_problem(file: Path, episode: str) -> str:
    """Return which other episode's folder the verdict is in, or an empty string."""
    # With symbolic links, both the link's folder and the file's folder count.
    for folder in {file.absolute().parent, file.resolve().parent}:
        is_episodes = HANDLE.fullmatch(folder.name.lower()) or folder.parent.name == "episodes"
        if is_episodes and (own := public_id(folder.name)) != episode:
            return f"it is the verdict of another episode; its folder belongs to {own}"
    return ""


def _summary(verdict: JsonObject) -> str:
    """Return the verdict's main values in one printable line; they are not verified yet."""
    reward = f" reward {verdict['reward']}" if "reward" in verdict else ""
    again = ", graded again" if "regrading" in verdict else ""
    text = (
        f"{verdict.get('task')} {verdict.get('status')}{reward}{again}, "
        f"episode {str(verdict.get('episode'))[:PUBLIC_ID_CHARACTERS]}"
    )
    return " ".join("".join(char for char in text[:200] if char.isprintable()).split())


def _read_verdicts(file: Path) -> Iterator[tuple[str, JsonObject | str]]:
    """Yield each verdict of a file with its place, or the reason why it could not be read."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        yield str(file), "not UTF-8"
        return
    # Not `splitlines`, which also splits at characters that JSON allows in a string, such as U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if sum(line.startswith("{") for _, line in lines) > 1:
        for number, line in lines:
            yield f"{file}:{number}", _parse_verdict(line)
    else:
        yield str(file), _parse_verdict(text)


def _parse_verdict(text: str) -> JsonObject | str:
    try:
        document = as_object(
            json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
        )
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    found: list[JsonObject] = []
    for path in VERDICT_PATHS:
        value = document
        for name in path:
            value = as_object((value or {}).get(name))
        if value is None or not {"episode", "status", "signature"} & value.keys():
            continue
        if not path and _is_record(value):
            continue
        found.append(value)
    if not found:
        return "no verdict"
    # Compared as text: in Python, true equals 1.
    texts = {json.dumps(value, sort_keys=True) for value in found}
    return found[0] if len(texts) == 1 else "two different verdicts in one document"


def _is_record(document: JsonObject) -> bool:
    """Whether a document is a batch's record of an attempt, which names the episode of its verdict."""
    verdict = as_object(document.get("verdict")) or {}
    is_verdict = bool({"status", "signature", "reward", "success"} & document.keys())
    return not is_verdict and verdict.get("episode") == document.get("episode")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
    # Of two members with one name some parsers use the first and others the last, so that a signature
    # would hold for a value that a reader never sees.
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("duplicate name in an object")
    return members


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _read_key(source: str) -> PublicKey:
    """Read a public key from a file, from the text itself, or from a server."""
    try:
        if urllib.parse.urlsplit(source).scheme in ("http", "https"):
            return read_key(_fetch(source))
        file = Path(source)
        return read_key(file.read_bytes() if file.is_file() else source.encode())
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error.strerror or error
        raise SettingsError(f"--key {source}: {reason}") from None
    except ValueError as error:
        raise SettingsError(
            f"--key {source}: {error}; expected a file, 64 hexadecimal digits, base64, or a server's URL"
        ) from None


def _fetch(url: str) -> bytes:
    parts = urllib.parse.urlsplit(url)
    if parts.path in ("", "/", "/mcp"):
        url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, WELL_KNOWN, "", ""))
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read(MAX_KEY_BYTES)


def _local_key(state: Path) -> PublicKey:
    check_state_folder(state)
    if not (state / KEY_FILE).exists():
        raise SettingsError(f"there is no server key in {state}: name the server's key with --key")
    return Signer.at(state).public


def _from_base64(text: object) -> bytes:
    """Decode base64. Raises ValueError for a text other than the canonical encoding of the bytes."""
    # Decoders ignore the last bits of a text, so that one signature would have several.
    value = b64decode(str(text), validate=True)
    if b64encode(value).decode() != text:
        raise ValueError("not canonical base64")
    return value
