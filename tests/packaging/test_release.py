"""The release workflow, run dry: its steps build and check the distributions, and none needs a secret."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from decathlon_mcp import __version__

REPOSITORY = Path(__file__).parents[2]
WORKFLOW = REPOSITORY / ".github" / "workflows" / "release.yml"
TAG = f"v{__version__}"


def step(name: str) -> str:
    """The script of a step of the job `build`."""
    workflow: Any = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    (script,) = (each["run"] for each in workflow["jobs"]["build"]["steps"] if each.get("name") == name)
    return script


def run_step(name: str, folder: Path, tag: str = TAG) -> subprocess.CompletedProcess[str]:
    """Run a step as the workflow does, in a checkout."""
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
        "HOME": str(folder),
        "GITHUB_REF_NAME": tag,
    }
    return subprocess.run(
        ["bash", "-e", "-c", step(name)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text("utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), "utf-8")

    return change


def add_a_file(folder: Path) -> None:
    (folder / "dist" / "notes.txt").touch()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout at the tag, after the step `Build`."""
    folder = tmp_path_factory.mktemp("release") / "checkout"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        if name.startswith(("tests/", "benchmarks/")) or not (REPOSITORY / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, folder / name)
    heading = f"## {__version__}"
    changes = (folder / "CHANGELOG.md").read_text("utf-8").replace(f"{heading}, not yet released", heading)
    (folder / "CHANGELOG.md").write_text(changes, "utf-8")
    done = run_step("Build", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_what_is_built_passes_the_check(built: Path) -> None:
    done = run_step("Check", built)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "tag", "message"),
    [
        (replace("README.md", "Harbor", "Harbor"), "v9.9.9", "pyproject.toml has version"),
        (
            replace("server.json", "==" + __version__, "==0.0.9"),
            TAG,
            "server.json's --from has version 0.0.9",
        ),
        (replace("CHANGELOG.md", f"## {__version__}", "## Soon"), TAG, "CHANGELOG.md has no heading"),
        (add_a_file, TAG, "one wheel and one source archive"),
    ],
)
def test_a_release_that_does_not_fit_is_refused(
    built: Path, tmp_path: Path, change: Callable[[Path], None], tag: str, message: str
) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(built, folder)
    change(folder)
    done = run_step("Check", folder, tag)
    assert done.returncode == 1
    assert message in done.stderr


def test_the_steps_follow_each_other_and_need_no_secret() -> None:
    text = WORKFLOW.read_text("utf-8")
    assert "secrets." not in text
    jobs: Any = yaml.safe_load(text)["jobs"]
    assert [(name, job.get("needs")) for name, job in jobs.items()] == [
        ("build", None),
        ("publish", "build"),
        ("registry", "publish"),
    ]
    # Trusted publishing: only these two jobs may show who they are.
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == [
        "publish",
        "registry",
    ]
