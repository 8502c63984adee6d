"""The package's public names, its imports, and the embedded server."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import anyio
import decathlon_client
import pytest
from decathlon_client import ClientError, Decathlon

from tests.probe.serving import SUITE, serving

REPOSITORY = Path(__file__).parents[2]


def test_all_lists_exactly_the_public_names() -> None:
    assert all(getattr(decathlon_client, name) is not None for name in decathlon_client.__all__)
    public = {
        name
        for name, value in vars(decathlon_client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public == set(decathlon_client.__all__) == set(dir(decathlon_client))
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        _ = decathlon_client.Server  # pyright: ignore[reportAttributeAccessIssue]


def test_the_packages_have_types_for_users() -> None:
    for package in ("decathlon_client", "tool_decathlon"):
        assert (REPOSITORY / "clients" / package / "py.typed").is_file()


def test_importing_the_client_loads_nothing_of_the_server_and_a_part_of_it_no_mcp() -> None:
    program = (
        "import sys, decathlon_client.client_values; print(*sys.modules)\n"
        "import tool_decathlon; tool_decathlon.ToolDecathlonEnv; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    part, whole = ({name.partition(".")[0] for name in line.split()} for line in loaded.stdout.splitlines())
    assert not part & {"mcp", "mcp_types", "anyio", "httpx2"}
    assert not whole & {"decathlon_mcp", "verifiers", "docker"}


def test_the_hubs_package_has_the_clients_version_and_requirements() -> None:
    whole, hub = (
        tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        for folder in (REPOSITORY, REPOSITORY / "clients")
    )
    project = whole["project"]
    verifiers = project["optional-dependencies"]["verifiers"]
    assert set(hub["project"]["dependencies"]) == {*project["dependencies"], *verifiers}
    assert [hub["project"][key] for key in ("version", "requires-python", "license")] == [
        project[key] for key in ("version", "requires-python", "license")
    ]
    packages = hub["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    everything = whole["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {f"clients/{package}" for package in packages} == {
        package for package in everything if package.startswith("clients/")
    }


@pytest.mark.parametrize(("arguments", "status"), [("help", 0), ("serve", 1)])
def test_the_command_without_the_server_names_the_missing_extra(arguments: str, status: int) -> None:
    code = (
        "import sys; sys.modules['cyclopts'] = None\n"
        f"sys.argv = ['decathlon-mcp', *{arguments.split()}, *['--no-supervisor'] * {status}]\n"
        "from decathlon_mcp.cli import main; main()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == status
    assert "pip install '.[server,starter]'" in (done.stderr if status else done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("missing", "use", "message"),
    [
        (
            "msgspec",
            "from decathlon_client.sync import Decathlon; Decathlon.embedded().__enter__()",
            "[server,",
        ),
        ("verifiers", "from tool_decathlon import load_environment", "[verifiers]"),
    ],
)
def test_what_is_used_without_its_packages_names_the_missing_extra(
    missing: str, use: str, message: str
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n{use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install '.{message}" in done.stderr.splitlines()[-1]
    assert missing in done.stderr


@pytest.mark.anyio
class TestEmbedded:
    @pytest.mark.slow  # an embedded server is played by `test_lockstep` on each change
    async def test_the_default_task_of_several_suites_is_played_without_arguments(
        self, tmp_path: Path
    ) -> None:
        async with (
            Decathlon.embedded([SUITE, "starter"], "host", "find-answer", state=tmp_path) as d,
            d.episode() as e,
        ):
            assert e.task == "find-answer"
            assert {task.suite for task in await d.tasks(prompts=False)} == {"probe", "starter"}

    async def test_an_unknown_setting_is_reported_on_entering(self) -> None:
        client = Decathlon.embedded(max_sandbox=3)
        with pytest.raises(
            ClientError, match="max_sandbox: there is no such field; did you mean max_sandboxes"
        ):
            await client.__aenter__()

    async def test_methods_require_an_entered_client(self, tmp_path: Path) -> None:
        d = Decathlon.embedded(SUITE, "host", state=tmp_path)
        with pytest.raises(RuntimeError, match="async with"):
            await d.tasks()


PLAYER = """
import sys, anyio
from decathlon_client import CallTimeoutError, Decathlon, UnknownTaskError

async def main(url):
    reports = []

    async def on_progress(progress, total, message):
        reports.append(progress)

    async with Decathlon(url) as d:
        try:
            async with d.episode("find-anser"):
                raise AssertionError("there is no such task")
        except UnknownTaskError as error:
            assert "find-answer" in error.near
        async with d.episode("find-answer") as e:
            await e.call("probe__count", {"to": 3, "pause": 0.01}, on_progress=on_progress)
            assert reports == [1, 2, 3], reports
            try:
                await e.call("probe__sleep", {"seconds": 100, "note": "late"}, timeout=0.3)
                raise AssertionError("it cannot have slept so long")
            except CallTimeoutError:
                pass
            async with d.attach(e.address) as again:
                await again.call("probe__write", {"path": "answer.txt", "text": "42"})
            print("reward", (await e.evaluate()).reward)

anyio.run(main, sys.argv[1])
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    # With the tests' own build backend: an environment for it would take half of the time.
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path, REPOSITORY], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.timeout(660)
@pytest.mark.parametrize("sdk", ["mcp>=1.24,<2", "mcp>=2.3,<3"])
async def test_the_bare_client_plays_with_either_sdk(sdk: str, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    await anyio.run_process([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    await anyio.run_process([*pip, "install", "--quiet", str(wheel), sdk])
    async with serving(tmp_path / "state", provider="host") as served:
        played = await anyio.run_process([str(python), "-c", PLAYER, served.url], check=False)
    assert (played.returncode, played.stdout) == (0, b"reward 1.0\n"), played.stderr.decode()
