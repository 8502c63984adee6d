"""What a raw result needs around it: the SDK's own pipeline drops what it does not know.

In 2026-07-28 every result says `resultType`, lists say how long they keep (`ttlMs`, `cacheScope`), and the
server signs in `_meta`; both SDK clients refuse a result without the first.
"""

from __future__ import annotations

from mcp_types import SERVER_INFO_META_KEY
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from decathlon_mcp import __version__
from decathlon_mcp.types import JsonObject, as_object

SERVER_INFO: JsonObject = {"name": "decathlon-mcp", "title": "Toolathlon", "version": __version__}


def is_modern(version: str) -> bool:
    """Is this a revision without a handshake?"""
    return version in MODERN_PROTOCOL_VERSIONS


def enveloped(result: JsonObject, version: str, *, keeps: bool = False) -> JsonObject:
    """The result, fit for that revision. `keeps`: it is a list that clients may cache until told."""
    if not is_modern(version):
        return result
    told: JsonObject = {"resultType": "complete", **({"ttlMs": 0, "cacheScope": "private"} if keeps else {})}
    told.update(result)
    meta = as_object(told.get("_meta")) or {}
    told["_meta"] = {SERVER_INFO_META_KEY: SERVER_INFO, **meta}
    return told
