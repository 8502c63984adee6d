"""Labels: the names and short texts by which clients find their episodes again.

One label is spelled `NAME=VALUE`. An address has several as parameters (`?label=run=a&label=step=7`), the
header `Decathlon-Labels` as a list (`run=a, step=7`) in which each value is percent-encoded. Known names are
`run`, `model`, `group`, `attempt` and `step`; all others are free.

They are text of a client's: no prompt, metric, evaluator or reply to an agent has them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from urllib.parse import unquote_to_bytes

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.validation import quoted

LABEL_HEADER = "decathlon-labels"
MAX_LABELS = 16
MAX_VALUE_CHARACTERS = 200
MAX_LABELS_BYTES = 2 << 10
"""All names and values of an episode, in UTF-8."""
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_ENCODED = re.compile(r"(?:[ -$&-~]|%[0-9A-Fa-f]{2})*")
"""Printable ASCII, with `%` only before two digits."""
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, line separators, and lone surrogates, which no signed verdict can have."""


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels, if names, values and sizes are allowed. Raises BadRequestError naming the label."""
    if len(labels) > MAX_LABELS:
        raise BadRequestError(f"an episode has at most {MAX_LABELS} labels, not {len(labels)}")
    for name, value in labels.items():
        if not _NAME.fullmatch(name):
            raise BadRequestError(
                f"the label {quoted(name)}: a name has 1 to 32 of the characters a-z, 0-9, `_`, `.`, `-` and "
                "begins with a letter"
            )
        if not 1 <= len(value) <= MAX_VALUE_CHARACTERS:
            raise BadRequestError(
                f"the label {name!r}: a value has 1 to {MAX_VALUE_CHARACTERS} characters, not {len(value)}"
            )
        if any(unicodedata.category(character) in _FORBIDDEN_CATEGORIES for character in value):
            raise BadRequestError(f"the label {name!r}: its value has a control character")
    size_bytes = sum(len(f"{name}{value}".encode()) for name, value in labels.items())
    if size_bytes > MAX_LABELS_BYTES:
        raise BadRequestError(
            f"the labels {', '.join(labels)} have {size_bytes} bytes, more than {MAX_LABELS_BYTES}"
        )
    return dict(labels)


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Labels of texts `NAME=VALUE`. Raises BadRequestError, also for a name that comes twice."""
    return merge_labels(*(dict([_pair(text)]) for text in texts))


def read_label_header(header: str) -> dict[str, str]:
    """The labels in the header's value. Raises BadRequestError."""
    pairs = [_pair(text.strip(" \t")) for text in header.split(",") if text.strip(" \t")]
    return merge_labels(*({name: _decoded(name, value)} for name, value in pairs))


def merge_labels(*sources: Mapping[str, str]) -> dict[str, str]:
    """The labels of several sources. Raises BadRequestError for a name that two of them have."""
    merged: dict[str, str] = {}
    for labels in sources:
        for name, value in labels.items():
            if name in merged:
                raise BadRequestError(f"the label {quoted(name)} is given twice")
            merged[name] = value
    return check_labels(merged)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise BadRequestError(f"the label {quoted(text)} is not NAME=VALUE")
    return name, value


def _decoded(name: str, value: str) -> str:
    """A header's value without its percent-encoding. Raises BadRequestError."""
    try:
        if _ENCODED.fullmatch(value):
            return unquote_to_bytes(value).decode()
    except UnicodeDecodeError:
        pass
    raise BadRequestError(f"the label {quoted(name)}: in a header, its value is percent-encoded UTF-8")
