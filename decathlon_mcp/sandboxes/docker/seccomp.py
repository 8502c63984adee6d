"""The seccomp profile of dense sandboxes: Docker's default, and one more value for personality(2).

An engine's default profile can be replaced but not extended. `seccomp.json` is the default of Docker Engine
28.5.2 (github.com/moby/profiles, seccomp/v0.1.0, under the Apache License 2.0), with one rule added: the
value 0x40000 (ADDR_NO_RANDOMIZE) of personality(2), so that processes can have fixed addresses. The engine
reduces it to the capabilities of the container, as it does with its own. Engines from 20.10 on read it.

A newer engine's own default may refuse more: that is the price of a dense sandbox until the copy is replaced.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

FIXED_ADDRESSES = 0x40000
"""The added value of personality(2)."""


@cache
def dense_profile() -> str:
    """The profile as the option `seccomp=` takes it: JSON, not a path."""
    text = (resources.files("decathlon_mcp.sandboxes.docker") / "seccomp.json").read_text("utf-8")
    # A third of the size: each request to create a container has it.
    return json.dumps(json.loads(text), separators=(",", ":"))
