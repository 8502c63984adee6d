"""Labels of episodes as texts: `NAME=VALUE` on command lines, and the header that starts of episodes take.

The server checks names and values.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Mapping
from datetime import datetime
from urllib.parse import quote

LABEL_HEADER = "Decathlon-Labels"
RUN, GROUP, ATTEMPT = "run", "group", "attempt"
"""The labels that a batch sets."""


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Labels of texts `NAME=VALUE`. Raises ValueError for another text, and for a name that comes twice."""
    labels: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"a label is NAME=VALUE, not {text!r}")
        if name in labels:
            raise ValueError(f"the label {name!r} is given twice")
        labels[name] = value
    return labels


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise TypeError if a name or a value is no text; numbers are not converted: `1` and `1.0` differ."""
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the label {name!r} must have a text as value, such as {str(value)!r}")


def label_headers(labels: Mapping[str, str]) -> dict[str, str]:
    """The headers that carry labels."""
    pairs = [f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in labels.items()]
    return {LABEL_HEADER: ", ".join(pairs)} if pairs else {}


def run_name(run: str | None, labels: Mapping[str, str]) -> str:
    """The name of a batch's run: the one given, or the date, the time and four letters.

    Raises ValueError if the labels set what a batch sets.
    """
    own = [name for name in (GROUP, ATTEMPT, *([RUN] if run else [])) if name in labels]
    if own:
        raise ValueError(f"a batch sets the labels {', '.join(own)} itself")
    letters = "".join(random.choices(string.ascii_lowercase, k=4))
    return run or labels.get(RUN) or f"{datetime.now():%Y-%m-%d-%H%M%S}-{letters}"
