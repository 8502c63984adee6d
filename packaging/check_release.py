"""Checks what a release publishes: one version everywhere, and a package page that works.

    python packaging/check_release.py v1.2.3 dist

Uses the standard library only. Prints each problem on stderr; exits with 1 if there are any.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def problems(tag: str, dist: Path) -> list[str]:
    """What is wrong with the distributions in `dist` for this tag."""
    version = tag.removeprefix("v")
    found = [
        f"{name} has version {other}, and the tag is {tag}" for name, other in versions() if other != version
    ]
    if f"\n## {version}\n" not in (REPOSITORY / "CHANGELOG.md").read_text("utf-8"):
        found.append(f"CHANGELOG.md has no heading `## {version}`")
    wheels = [*dist.glob(f"decathlon_mcp-{version}-*.whl")]
    sources = [*dist.glob(f"decathlon_mcp-{version}.tar.gz")]
    if (len(wheels), len(sources)) != (1, 1) or len([*dist.iterdir()]) != 2:
        names = ", ".join(sorted(path.name for path in dist.iterdir())) or "nothing"
        return [*found, f"{dist} has to have one wheel and one source archive of {version}, and has {names}"]
    return [*found, *page_problems(wheel_metadata(wheels[0]))]


def versions() -> list[tuple[str, str]]:
    """Each place that has the version."""
    registry: Any = json.loads((REPOSITORY / "server.json").read_text("utf-8"))
    (package,) = registry["packages"]
    manifest = json.loads((REPOSITORY / "packaging" / "bundle" / "manifest.json").read_text("utf-8"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    return [
        ("pyproject.toml", project["version"]),
        ("server.json", registry["version"]),
        ("server.json's package", package["version"]),
        ("server.json's --from", package["runtimeArguments"][0]["value"].partition("==")[2]),
        ("packaging/bundle/manifest.json", manifest["version"]),
        ("CITATION.cff", _line_of_citation("version")),
    ]


def _line_of_citation(field: str) -> str:
    match = re.search(rf"^{field}: (.*)$", (REPOSITORY / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    return match[1] if match else ""


def wheel_metadata(wheel: Path) -> Message:
    """The wheel's METADATA; its payload is the page's text."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def page_problems(metadata: Message) -> list[str]:
    """What is wrong with the package's page."""
    text = str(metadata.get_payload())
    server = json.loads((REPOSITORY / "server.json").read_text("utf-8"))["name"]
    found = [f"the page has a relative link: {link}" for link in RELATIVE_LINK.findall(text)]
    if f"mcp-name: {server} " not in text:
        found.append(
            f"the page does not have `mcp-name: {server}`, by which the MCP registry knows its owner"
        )
    return found


def main() -> None:
    """Check the tag and the folder on the command line."""
    if len(sys.argv) != 3:
        sys.exit("usage: python packaging/check_release.py TAG FOLDER")
    found = problems(sys.argv[1], Path(sys.argv[2]))
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
