"""The program that makes a sandbox trust the proxy's authority, and the variables for its programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from decathlon_mcp.payloads import source
from tests.arxiv.authority import Authority

BUNDLE = "-----BEGIN CERTIFICATE-----\nown\n-----END CERTIFICATE-----\n"


def install(folder: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Run the payload as a sandbox would, with an own bundle; returns what it wrote to the channel."""
    bundle = folder / "own.pem"
    bundle.write_text(BUNDLE)
    read, write = os.pipe()
    with os.fdopen(read) as channel:
        try:
            subprocess.run(
                [sys.executable, "-c", source("trust", "decathlon_mcp.plugins.web"), json.dumps(order)],
                env={**os.environ, "SSL_CERT_FILE": str(bundle), "DECATHLON_CHANNEL": str(write)},
                pass_fds=(write,),
                timeout=60,
                check=True,
            )
        finally:
            os.close(write)
        return json.loads(channel.read())


def test_the_authority_is_added_to_what_the_sandbox_trusts(tmp_path: Path) -> None:
    pem, target = Authority().pem, tmp_path / "root" / ".decathlon-web"
    order: dict[str, Any] = {
        "authority": pem,
        "folder": str(target),
        "search": [],
        "system": False,
        "resolver": True,
    }
    assert install(tmp_path, order) == {"bundles": 0, "nss": False, "resolver": False}
    assert (target / "authority.pem").read_text() == pem
    assert (target / "bundle.pem").read_text() == BUNDLE + pem
