"""What the preprocess scripts of a checkout write, and where.

    python -m tests.suites.preprocess_writes CHECKOUT [--image IMAGE] [--python PYTHON]

Each script runs in a container without a network, and every change to its file systems is listed. Modules
that the image lacks (database clients, service SDKs) are replaced by mocks that accept everything, so that
scripts run as far as they can without their services; those that fail nevertheless are listed with the end of
their output. Each script's source is also searched for fixed paths outside of the workspace and the task's
folder.

Prints one JSON object a task: `wrote` (paths outside of the workspace and the task's folder, bytecode left
out), `running` (number of processes left running), `error`, and `source` (lines of the source). A summary
follows.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import anyio

from decathlon_mcp.app import create_sandbox_factory
from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.settings import read_settings
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

MOCKS = PurePosixPath("/opt/preprocess-writes")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUN_SECONDS = 60.0
OUTPUT_CHARACTERS = 300

PYTHON_PROGRAM = b'#!/bin/sh\nexec python3 "$@"\n'
UV_PROGRAM = b'#!/bin/sh\n[ "$1 $2" = "run python" ] && shift 2 && exec python3 "$@"\n'
MOCKED_FIRST = ("utils.api_model",)
"""Modules of a checkout that are mocked, too: they need the packages of a language model's client."""
CREDENTIALS = (
    "gcp-service_account.keys",
    "google_cloud_credentials",
    "google_credentials",
    "google_sheets_credentials",
)
"""Files in `configs` that scripts read; none of them is in a checkout."""
MOCK_MODULES = f"""
import email.message, importlib.abc, importlib.machinery, sys, time, types
from unittest.mock import MagicMock

class MockError(Exception):
    def __init__(self, *arguments, **names):
        super().__init__(*map(str, arguments))

class Mock(MagicMock):
    def __init__(self, *arguments, **names):
        super().__init__()
    def __getattr__(self, name):
        if name.endswith(("Error", "Exception", "Timeout")):
            return MockError
        return super().__getattr__(name)

class Dict(dict):
    def __getattr__(self, name):
        return self.setdefault(name, "value")
    def __setattr__(self, name, value):
        self[name] = value

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        ours = name.split(".")[0] in ("tasks", "utils", "configs", "usercustomize", "apport_python_hook")
        if (name.startswith(self.names) if self.names else not ours):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Mock()
    def exec_module(self, module):
        module.__path__ = []

sys.modules["addict"] = types.ModuleType("addict")
sys.modules["addict"].Dict = Dict
sys.meta_path.insert(0, Finder({MOCKED_FIRST!r}))
sys.meta_path.append(Finder(()))
time.sleep = lambda seconds: None
"""
CHANGED = """
import json, os, sys
moment, found = int(sys.argv[1]), []
for folder, folders, files in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys")]
    for name in (*files, *folders):
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if status.st_ctime_ns >= moment and (name in files or not os.listdir(path)):
            if not path.endswith(".pyc") and not path.startswith(tuple(sys.argv[2:])):
                found.append(path)
with open(int(os.environ["DECATHLON_CHANNEL"]), "w") as channel:
    json.dump(found[:200], channel)
"""
FIXED_PLACE = re.compile(r"""^(/tmp|/var|/dev/shm|/run|/root|/home|/opt|/etc|/srv|~)(/|$)""")


def fixed_places(preprocess: Path) -> Iterator[str]:
    """Lines of the source that name a fixed place or a temporary file, or write to the current folder.

    The current folder of a preprocess is the suite's root, which all tasks share.
    """
    for file in sorted(preprocess.rglob("*.py")):
        text = file.read_text("utf-8", "replace")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        found = {line for node in ast.walk(tree) if (line := _line_of_fixed_place(node)) is not None}
        for line in sorted(found):
            yield f"{file.relative_to(preprocess.parent)}:{line}: {lines[line - 1].strip()[:120]}"


def _line_of_fixed_place(node: ast.AST) -> int | None:
    match node:
        case ast.Constant(value=str(value)) if FIXED_PLACE.match(value):
            return node.lineno
        case ast.Attribute() if ast.unparse(node).startswith(
            ("tempfile.", "Path.home", "os.path.expanduser")
        ):
            return node.lineno
        case ast.Call(
            func=ast.Name(id="open"), args=[ast.Constant(value=str(path)), ast.Constant(value=str(mode))]
        ):
            return node.lineno if mode[:1] in "wax" and not path.startswith("/") else None
        case ast.Call(
            func=ast.Attribute(attr="makedirs" | "mkdir"), args=[ast.Constant(value=str(path)), *_]
        ):
            return None if path.startswith("/") else node.lineno
        case _:
            return None


async def run_preprocess(factory: SandboxFactory, task: Task, python: str, folder: Path) -> JsonObject:
    """Run a task's preprocess in a new sandbox; what it changed outside of its own places."""
    suite, profile = factory.suite, factory.suite.profile
    archive = folder / f"{task.id}.tar"
    shutil.copyfile(factory.common, archive)
    suite.task_archive(task, archive, sealed=True)
    async with factory.open(f"writes-{re.sub('[^a-z0-9]', '-', task.id.lower())}"[:60], "none") as (
        sandbox,
        driver,
    ):
        root, workspace = sandbox.root, sandbox.root / profile.workspace
        await sandbox.put(root, archive)
        await sandbox.put(MOCKS, pack_files({"sitecustomize.py": MOCK_MODULES.encode()}))
        # Scripts also start these, which the tests' image does not have.
        await sandbox.put(MOCKS / "bin", pack_files({"python": PYTHON_PROGRAM, "uv": UV_PROGRAM}, mode=0o755))
        await anyio.Path(archive).unlink()
        await driver.arrange({"make": str(workspace)}, *_missing_credentials(suite.path, root))
        if task.files.initial_workspace:
            initial = root / task.folder / task.files.initial_workspace
            await driver.arrange({"copy": str(initial), "to": str(workspace)})
        since = await driver.snapshot()
        module = ".".join((*task.folder.parts, str(task.files.preprocess)))
        launch_time = suite.preprocess_launch_time(datetime.now())
        result = await driver.run(
            [python, "-m", module, "--agent_workspace", str(workspace), "--launch_time", launch_time],
            cwd=str(root),
            env={**dict(profile.environment), "PYTHONPATH": str(MOCKS), "PATH": f"{PATH}:{MOCKS}/bin"},
            timeout_seconds=RUN_SECONDS,
            leave=True,
            linger_seconds=0.5,
        )
        own = [str(workspace), str(root / task.folder)]
        changed = await driver.run(
            ["python3", "-I", "-c", CHANGED, str(since["moment_ns"]), *(f"{path}/" for path in own), *own],
            cwd="/",
            timeout_seconds=RUN_SECONDS,
            channel=True,
        )
    wrote = json.loads(changed.channel or "[]")
    failed = result.timed_out or result.exit_code != 0
    error = (result.stderr or result.stdout).strip()[-OUTPUT_CHARACTERS:] if failed else ""
    return {"wrote": wrote, "running": result.background, "error": "timed out" if result.timed_out else error}


def _missing_credentials(checkout: Path, root: PurePosixPath) -> list[JsonObject]:
    """The steps that write credential files with invented values, unless the checkout has them."""
    values = (
        "project_id",
        "token",
        "access_token",
        "refresh_token",
        "client_id",
        "client_secret",
        "client_email",
        "token_uri",
    )
    text = json.dumps({**dict.fromkeys(values, "value"), "scopes": []})
    files = [PurePosixPath("configs", f"{name}.json") for name in CREDENTIALS]
    return [{"write": str(root / file), "text": text} for file in files if not (checkout / file).exists()]


async def scan(checkout: Path, image: str, python: str, at_once: int) -> list[JsonObject]:
    """The report of every task that has a preprocess; printed as they end."""
    reports: list[JsonObject] = []
    limiter = anyio.CapacityLimiter(at_once)
    with tempfile.TemporaryDirectory() as name:
        folder, suite = Path(name), load_suite(checkout)
        common = folder / "common.tar"
        suite.common_archive(common)
        async with DockerProvider("preprocess-writes") as provider:
            factory = create_sandbox_factory(suite, provider, common, read_settings({}))
            factory = replace(factory, image=image)

            async def report(task: Task) -> None:
                async with limiter:
                    result: JsonObject
                    try:
                        result = await run_preprocess(factory, task, python, folder)
                    except DecathlonError as error:
                        result = {"wrote": [], "running": 0, "error": error.message}
                source = [*fixed_places(checkout / task.folder / "preprocess")]
                reports.append({"task": task.id, **result, "source": source})
                sys.stdout.write(json.dumps(reports[-1]) + "\n")
                sys.stdout.flush()

            async with anyio.create_task_group() as tasks:
                for task in suite.tasks.values():
                    if task.has_preprocess:
                        tasks.start_soon(report, task)
    return reports


def summary(reports: list[JsonObject]) -> JsonObject:
    """Numbers of tasks, and the places outside of workspace and task folder with their tasks."""
    places: dict[str, Any] = {}
    for report in reports:
        for path in report["wrote"]:
            places.setdefault(path, []).append(report["task"])
    counts = Counter[str]()
    for report in reports:
        counts["tasks"] += 1
        counts["write elsewhere"] += bool(report["wrote"])
        counts["leave processes running"] += bool(report["running"])
        counts["failed"] += bool(report["error"])
        counts["name a fixed place"] += bool(report["source"])
    return {**counts, "places": dict(sorted(places.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--image", default="decathlon-test:latest")
    parser.add_argument("--python", default="python3", help="Python of the image that runs the scripts")
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    reports = anyio.run(scan, arguments.checkout, arguments.image, arguments.python, arguments.at_once)
    sys.stdout.write(json.dumps(summary(reports), indent=1) + "\n")


if __name__ == "__main__":
    main()
