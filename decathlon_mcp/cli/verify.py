"""`verify` and `key`: is a verdict what a server signed, and which key does it sign with."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.grading.signing import BadSignatureError, PublicKey, Signer
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.keys import KEY_FILE
from decathlon_mcp.types import JsonObject, as_object

WELL_KNOWN = "/.well-known/decathlon-key"
FETCH_SECONDS = 10
KEY_BYTES = 1 << 16
WRAPPED = (("structuredContent",), ("result", "structuredContent"), ("_meta", "decathlon/verdict"))
"""Where in a kept reply of `evaluate` the verdict is."""


def show_key(state: Path | None) -> int:
    """Print the public half of the server's key, made where there is none yet, as the server tells it."""
    public = Signer.at(state or default_state()).public
    sys.stdout.write(json.dumps(public.to_json()) + "\n")
    return 0


def verify(files: Sequence[Path], keys: Sequence[str], state: Path | None) -> int:
    """Print a line for each verdict; 0 only when there are some and each is signed with one of the keys."""
    known = [_key(said) for said in keys] or [_own_key(state or default_state())]
    checked = [_check(where, told, known) for file in files for where, told in _verdicts(file)]
    bad = checked.count(False)
    if bad:
        sys.stderr.write(f"decathlon-mcp: {bad} of {len(checked)} do not verify\n")
    return 1 if bad else 0


def _check(where: str, told: JsonObject | str, keys: Iterable[PublicKey]) -> bool:
    fault = told if isinstance(told, str) else _fault(told, keys)
    said = "" if isinstance(told, str) else f"{_words(told)}: "
    sys.stdout.write(f"{'BAD' if fault else 'ok '} {where}: {said}{fault or 'signed'}\n")
    return not fault


def _fault(told: JsonObject, keys: Iterable[PublicKey]) -> str:
    """Why it does not verify; empty where it does."""
    faults: dict[str, str] = {}
    for key in keys:
        try:
            key.check(told)
        except BadSignatureError as error:
            faults[key.id] = error.message
        else:
            return ""
    signed_with = (as_object(told.get("signature")) or {}).get("key")
    return faults.get(str(signed_with)) or next(iter(faults.values()))


def _words(told: JsonObject) -> str:
    """What it says, in a line; nothing of it is believed yet."""
    reward = f" reward {told['reward']}" if "reward" in told else ""
    said = f"{told.get('task')} {told.get('status')}{reward}, episode {str(told.get('episode'))[:12]}"
    return " ".join("".join(sign for sign in said[:200] if sign.isprintable()).split())


def _verdicts(file: Path) -> Iterator[tuple[str, JsonObject | str]]:
    """Each verdict of a file with where it stands, or what is wrong there."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        yield str(file), "not UTF-8"
        return
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if sum(line.startswith("{") for _, line in lines) > 1:
        for number, line in lines:
            yield f"{file}:{number}", _verdict(line)
    else:
        yield str(file), _verdict(text)


def _verdict(text: str) -> JsonObject | str:
    """The verdict that a JSON text is or holds, or what is wrong with it."""
    try:
        value = as_object(json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number))
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    for way in ((), *WRAPPED):
        found = value
        for name in way:
            found = as_object((found or {}).get(name))
        if found is not None and {"episode", "status", "signature"} & found.keys():
            return found
    return "no verdict"


def _once_each(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Of two members of one name, some parsers take the first and others the last."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name is there twice in one object")
    return members


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _key(said: str) -> PublicKey:
    """A public key: a file with one, itself, or where a server tells its own."""
    try:
        if urllib.parse.urlsplit(said).scheme in ("http", "https"):
            return PublicKey.read(_fetched(said))
        file = Path(said)
        return PublicKey.read(file.read_bytes() if file.is_file() else said.encode())
    except OSError as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error.strerror or error
        raise SettingsError(f"--key {said}: {why}") from None
    except ValueError as error:
        raise SettingsError(
            f"--key {said}: {error}; it is a file, 64 hexadecimal digits, base64, or a server's address"
        ) from None


def _fetched(url: str) -> bytes:
    parts = urllib.parse.urlsplit(url)
    if parts.path in ("", "/", "/mcp"):
        url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, WELL_KNOWN, "", ""))
    with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
        return answer.read(KEY_BYTES)


def _own_key(state: Path) -> PublicKey:
    if not (state / KEY_FILE).exists():
        raise SettingsError(f"no server has made a key in {state}: say with --key which server's it was")
    return Signer.at(state).public
