"""The program that makes a sandbox trust the proxy's authority, and the variables for its programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from decathlon_mcp.payloads import source
from tests.web.sites import Authority

BUNDLE = "-----BEGIN CERTIFICATE-----\nown\n-----END CERTIFICATE-----\n"


def install(folder: Path, order: dict[str, Any]) -> None:
    """Run the payload as a sandbox would, with an own bundle."""
    bundle = folder / "own.pem"
    bundle.write_text(BUNDLE)
    subprocess.run(
        [sys.executable, "-c", source("trust", "decathlon_mcp.plugins.web"), json.dumps(order)],
        env={**os.environ, "SSL_CERT_FILE": str(bundle)},
        timeout=60,
        check=True,
    )


def test_the_authority_is_added_to_what_the_sandbox_trusts(tmp_path: Path) -> None:
    pem, target = Authority().pem, tmp_path / "root" / ".decathlon-web"
    order: dict[str, Any] = {
        "authority": pem,
        "folder": str(target),
        "search": [],
        "system": False,
        "resolver": True,
    }
    resolver = Path("/etc/resolv.conf").read_bytes()
    install(tmp_path, order)
    assert Path("/etc/resolv.conf").read_bytes() == resolver
    assert (target / "authority.pem").read_text() == pem
    assert (target / "bundle.pem").read_text() == BUNDLE + pem
