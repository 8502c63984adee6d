"""Makes a sandbox trust the authority of the web proxy.

    python3 -c SOURCE '{"authority": PEM, "folder": DIR, "search": [DIR...], "system": BOOL,
                        "resolver": BOOL}'

In `folder` it writes `authority.pem` and `bundle.pem`, the authorities of the sandbox and this authority.
With `system`, where the sandbox has file systems of its own, it also adds the authority

- to the system's bundles, and to the folder in which OpenSSL looks for single certificates;
- to the bundles of the Python environments below `search` (of certifi, pip and httplib2);
- to Chromium, by a managed policy.

With `resolver` too, /etc/resolv.conf names 127.0.0.1. What cannot be written is left out. Standard library
only, any Python from 3.10.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
)
CERTIFICATES = Path("/etc/ssl/certs")
PACKAGE_BUNDLES = ("certifi/cacert.pem", "pip/_vendor/certifi/cacert.pem", "httplib2/cacerts.txt")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
SKIPPED = {"node_modules", "__pycache__", ".git"}
POLICY_FOLDERS = tuple(
    f"/etc/{product}/policies/managed" for product in ("chromium", "opt/chrome", "opt/chrome_for_testing")
)
MAX_FOLDERS = 50_000
MAX_DEPTH = 9
PROGRAM_SECONDS = 20
"""For `openssl`."""


def read(path: Path) -> str:
    """The text of a file, empty if there is none."""
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8", "surrogateescape")


def append(path: Path, authority: str) -> None:
    """Add the authority to a bundle, if there is one."""
    text = read(path)
    if text and authority not in text:
        write(path, text.rstrip("\n") + "\n" + authority)


def package_bundles(folders: list[str]) -> Iterator[Path]:
    """The bundles of the Python environments below these folders."""
    visited = 0
    for top in folders:
        depth = top.rstrip("/").count("/")
        for name, children, _ in os.walk(top):
            visited += 1
            if visited > MAX_FOLDERS:
                return
            folder = Path(name)
            if folder.name in PACKAGE_FOLDERS:
                yield from (folder / bundle for bundle in PACKAGE_BUNDLES if (folder / bundle).is_file())
                children.clear()
            elif name.count("/") - depth >= MAX_DEPTH:
                children.clear()
            else:
                children[:] = [child for child in children if child not in SKIPPED]


def first_bundle(search: list[str]) -> str:
    """The authorities that programs in this sandbox trust so far, as PEM."""
    own = [os.environ.get(name, "") for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]
    for path in [*own, *SYSTEM_BUNDLES]:
        if path and (text := read(Path(path))):
            return text
    return next((read(path) for path in package_bundles(search)), "")


def add_to_folder(authority: str) -> None:
    """Add the authority to the folder of single certificates, under the name that OpenSSL computes."""
    openssl = shutil.which("openssl")
    if openssl is None or not CERTIFICATES.is_dir():
        return
    path = CERTIFICATES / "decathlon-web.pem"
    write(path, authority)
    command = [openssl, "x509", "-noout", "-hash", "-in", str(path)]
    name = subprocess.run(command, capture_output=True, timeout=PROGRAM_SECONDS, text=True, check=True).stdout
    link = CERTIFICATES / f"{name.strip()}.0"
    if not link.exists():
        link.symlink_to(path.name)


def add_policy(authority: str) -> None:
    """Name the authority in a managed policy of Chromium and Chrome (version 131 and later read it)."""
    certificate = base64.b64encode(ssl.PEM_cert_to_DER_cert(authority)).decode()
    for folder in POLICY_FOLDERS:
        write(Path(folder, "decathlon-web.json"), json.dumps({"CACertificates": [certificate]}))


def attempt(act: Callable[..., None], *arguments: object) -> None:
    """Make a change that this user may not be allowed, or that needs a program that may not work."""
    with suppress(OSError, subprocess.SubprocessError):
        act(*arguments)


def main() -> None:
    order = json.loads(sys.argv[1])
    authority, folder, search = order["authority"].strip() + "\n", Path(order["folder"]), order["search"]
    write(folder / "authority.pem", authority)
    write(folder / "bundle.pem", first_bundle(search).rstrip("\n") + "\n" + authority)
    if not order["system"]:
        return
    bundles = {Path(bundle).resolve() for bundle in SYSTEM_BUNDLES}
    bundles |= {bundle.resolve() for bundle in package_bundles(search)}
    for bundle in sorted(bundles):
        attempt(append, bundle, authority)
    attempt(add_to_folder, authority)
    attempt(add_policy, authority)
    if order["resolver"]:
        attempt(write, Path("/etc/resolv.conf"), "nameserver 127.0.0.1\noptions ndots:0 timeout:2\n")


if __name__ == "__main__":
    main()
