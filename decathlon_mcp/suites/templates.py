"""`${name}` in a server's yaml, as Toolathlon fills it (`utils/mcp/tool_servers.py`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

log = logging.getLogger("decathlon.suites")

_TEMPLATE = re.compile(r"\$\{([^}]+)\}")

ALIASES = {"podman_or_docker": "config.podman_or_docker"}
"""Names that stand for a value of the suite's configuration."""


def names_in(text: str) -> frozenset[str]:
    """The names that a text wants filled in."""
    found: list[str] = _TEMPLATE.findall(text)
    return frozenset(ALIASES.get(name, name) for name in found)


def fill(text: str, values: Mapping[str, str], *, server: str) -> str:
    """`text` with every known name replaced; an unknown one is left as it is, with a warning."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        value = values.get(ALIASES.get(name, name))
        if value is None:
            log.warning(
                "a template's name is unknown and was left as it is",
                extra={"fields": {"server": server, "name": name}},
            )
            return match.group(0)
        return value

    return _TEMPLATE.sub(replace, text)
