"""Limits on the depth and the number of nodes of JSON text, checked before anything decodes it.

A decoder's memory and time depend on the nodes rather than on the bytes: 4 MiB of `[]` become some 250 MB of
Python objects, and decoding holds the GIL for a third of a second. Counting the structural characters of
4 MiB takes 1 to 10 ms; 20 ms if it is a string full of escapes and structural characters.
"""

from __future__ import annotations

import codecs
from array import array
from itertools import accumulate

import msgspec

MAX_DEPTH = 128
"""Depth of nested arrays and objects in one message. Decoders that recurse give up from about 200."""

MAX_NODES = 100_000
"""Values and keys in one message: `json.loads` needs some 10 ms for them."""

_MAX_DIGITS = 200
"""Digits in a row that need no closer look: with an exponent of two digits, the number is below the largest
`float`, which has 309 digits. Python reads integers of up to 4,300."""

MAX_LONG_NUMBERS = 100
"""How many times a message may have `_MAX_DIGITS` digits in a row outside of strings. The time that Python
takes for an integer grows with the square of its digits: 4 MiB of the longest take a quarter of a second, in
which no other thread runs."""
_FEW_BYTES = 1 << 16
"""A shorter text cannot have so many long numbers that decoding it takes more than some milliseconds."""

_DECODED_BYTES = 1 << 18
_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_ALL = bytes(range(256))
_NOT_NODES = _ALL.translate(None, b"[{,:")
_NOT_STRUCTURE = _ALL.translate(None, b'[]{},:"')
_NOT_BRACKETS = _ALL.translate(None, b"[]{}")
# As signed bytes: 1 for an opening, -1 for a closing bracket.
_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
_NUMBER_FORMS = bytes.maketrans(b"123456789E", b"000000000e")
_MANY_DIGITS, _LARGE_EXPONENT, _LARGE_SIGNED_EXPONENT = b"0" * _MAX_DIGITS, b"0e000", b"0e+000"


class JsonLimitError(ValueError):
    """JSON text is over a limit; the message names the limit."""


def check_json(
    data: bytes | bytearray | memoryview, *, max_depth: int = MAX_DEPTH, max_nodes: int = MAX_NODES
) -> int:
    """Check the depth and the number of nodes of JSON text in UTF-8. Returns an upper bound of the nodes.

    Nodes are values and the keys of objects; an empty array or object counts as two. An array in the root
    array has depth 2. Nothing else is checked: in text that is not JSON, the limits hold up to the place
    where a decoder finds the error. Raises JsonLimitError.
    """
    text = data.tobytes() if isinstance(data, memoryview) else data
    # `json.loads` also reads UTF-16 and UTF-32, in which the bytes below have other meanings. JSON in UTF-8
    # contains no NUL, and every JSON text in the other two does.
    if b"\0" in text:
        raise JsonLimitError("the JSON text is not in UTF-8: it contains a NUL byte")
    # Few structural characters, whether in strings or not, settle both limits in one pass.
    if len(text) > _FEW_BYTES:
        _check_numbers(text, max_nodes)
    upper_bound = text.translate(None, _NOT_NODES)
    if len(upper_bound) < max_nodes and _openings(upper_bound) <= max_depth:
        return 1 + len(upper_bound)
    structure = _outside_strings(text, max_nodes)
    nodes = _count(structure)
    if nodes > max_nodes:
        raise _too_many(max_nodes)
    brackets = structure.translate(None, _NOT_BRACKETS)
    if _openings(brackets) <= max_depth:
        return nodes
    # Valid JSON has no more closing than opening brackets, whose number is limited by now.
    steps = array("b", brackets[: 2 * max_nodes].translate(_STEPS))
    if max(accumulate(steps)) > max_depth:
        raise JsonLimitError(f"the JSON text is nested deeper than {max_depth} levels")
    return nodes


def _check_numbers(text: bytes | bytearray, max_nodes: int) -> None:
    forms = text.translate(_NUMBER_FORMS)
    if forms.count(_MANY_DIGITS) <= MAX_LONG_NUMBERS:
        return
    unescaped = _without_escapes(forms)
    if unescaped.count(b'"') > 2 * max_nodes:
        raise _too_many(max_nodes)
    if b" ".join(unescaped.split(b'"')[::2]).count(_MANY_DIGITS) > MAX_LONG_NUMBERS:
        raise JsonLimitError("the JSON text has too many long numbers")


def check_undecoded(data: bytes) -> None:
    """Check what `msgspec.Raw` leaves unchecked in JSON text: the encoding, and the range of numbers.

    Everything else is checked when the text becomes a `Raw`: syntax, escapes, unpaired surrogates, NaN.
    Raises ValueError.
    """
    if not data.isascii():
        decoder = _utf8_decoder()
        # In parts: while one is decoded, no other thread runs.
        for start in range(0, len(data), _DECODED_BYTES):
            decoder.decode(data[start : start + _DECODED_BYTES], final=start + _DECODED_BYTES >= len(data))
    # Python's decoders refuse integers of more than 4,300 digits, and make an infinity of 1e999, which is no
    # JSON. Both are rare, and so is text that looks like them.
    forms = data.translate(_NUMBER_FORMS)
    if _MANY_DIGITS in forms or _LARGE_EXPONENT in forms or _LARGE_SIGNED_EXPONENT in forms:
        try:
            msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(str(error)) from None


def count_nodes(text: bytes | bytearray) -> int:
    """The number of nodes of JSON text that `check_json` accepts, without what strings contain.

    Raises JsonLimitError if it contains more than `MAX_NODES` strings.
    """
    return _count(_outside_strings(text, MAX_NODES))


def _count(structure: bytes | bytearray) -> int:
    return 1 + len(structure.translate(None, _NOT_NODES))


def _outside_strings(text: bytes | bytearray, max_nodes: int) -> bytes | bytearray:
    """The structural characters of a JSON text, strings skipped."""
    structure = _without_escapes(text).translate(None, _NOT_STRUCTURE)
    # Each string is a node, so the number of parts below is limited too.
    if structure.count(b'"') > 2 * max_nodes:
        raise _too_many(max_nodes)
    return b"".join(structure.split(b'"')[::2])


def _without_escapes(text: bytes | bytearray) -> bytes | bytearray:
    """The text without escaped quotation marks: every remaining mark begins or ends a string."""
    if b"\\" not in text:
        return text
    # First the escaped backslashes, so that every backslash which remains escapes what follows it.
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _openings(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{")


def _too_many(max_nodes: int) -> JsonLimitError:
    return JsonLimitError(f"the JSON text has more than {max_nodes:,} values and keys")
