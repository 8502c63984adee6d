"""JSON in its one canonical form (RFC 8785), so that a signature outlives being parsed and written anew.

Keys are sorted, there is no white space, and a number is written as ECMAScript writes it: `1.0` and `1` are
the same, whatever wrote them on the way.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import cast

MAX_INTEGER = 2**53
"""Whole numbers beyond it are not the same in every JSON parser."""


def canonical(value: object) -> bytes:
    """The canonical form of a JSON value. Raises ValueError for what has none."""
    return _written(value).encode()


def _written(value: object) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            return _number(value)
        case list() | tuple():
            return f"[{','.join(_written(item) for item in cast('list[object]', value))}]"
        case dict():
            members = cast("dict[str, object]", value)
            names = sorted(members, key=lambda name: name.encode("utf-16-be"))
            return f"{{{','.join(f'{_written(name)}:{_written(members[name])}' for name in names)}}}"
        case _:
            raise ValueError(f"not a value of JSON: {type(value).__name__}")


def _number(number: float) -> str:
    """As ECMA-262's Number::toString has it: the fewest digits, an exponent from 1e21 on and below 1e-6."""
    if not math.isfinite(number) or (isinstance(number, int) and abs(number) > MAX_INTEGER):
        raise ValueError(f"not a number that every JSON parser reads alike: {number!r}")
    if number == 0:
        return "0"
    sign, parts, exponent = Decimal(repr(number)).normalize().as_tuple()
    digits = "".join(map(str, parts))
    point = len(digits) + int(exponent)
    if len(digits) <= point <= 21:
        text = digits.ljust(point, "0")
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        rest = f".{digits[1:]}" if digits[1:] else ""
        text = f"{digits[0]}{rest}e{point - 1:+d}"
    return f"-{text}" if sign else text
