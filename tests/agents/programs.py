"""The commands of `docs/agent-programs.md`, with the real programs and a scripted model on loopback.

Not part of the normal test run, because it installs a gigabyte. To run it:

    python -m pytest tests/agents/programs.py

Each program plays a task as printed, in namespaces, where it reaches nothing but its episode and the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from decathlon_client.script import Step

from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.plugins.agents.agent_programs import PRESETS
from tests.agents.models import RECIPE, JsonObject, streaming_model
from tests.conformance.suites import environment as node_environment
from tests.conformance.suites import run_npm
from tests.docs.pages import block

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

PAGE = "docs/agent-programs.md"
PACKAGES = ("@anthropic-ai/claude-code", "@openai/codex", "opencode-ai", "@google/gemini-cli")
STEPS = (
    Step("files__write_file", {"path": "recipe.json", "text": RECIPE}),
    Step("claim_done", {"answer": "60 degrees"}),
)
INSTALL_SECONDS = 900
PLAY_SECONDS = 300
REMAINING = {
    "Claude Code": {"DeferredToolPlaceholder"},
    "Codex": {
        *("list_mcp_resources", "list_mcp_resource_templates", "read_mcp_resource", "request_user_input"),
    },
    "opencode": set[str](),
    "Gemini CLI": set[str](),
}
"""Tools that each program may offer its model besides the task's, as the page says."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of all packages."""
    folder = tmp_path_factory.mktemp("programs")
    run_npm(folder, "install", "--no-audit", "--no-fund", *PACKAGES, seconds=INSTALL_SECONDS)
    return folder / "node_modules" / ".bin"


@pytest.mark.timeout(INSTALL_SECONDS + PLAY_SECONDS)
@pytest.mark.parametrize("heading", REMAINING)
def test_program_plays_as_printed_with_the_tools_of_the_task(
    heading: str, programs: Path, tmp_path: Path
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "decathlon-mcp").symlink_to(Path(sys.executable).with_name("decathlon-mcp"))
    home = tmp_path / "home"
    home.mkdir()
    with streaming_model(STEPS) as (url, requests):
        # The verdict is in the line of the only attempt.
        text = block(PAGE, heading, "bash").text.replace("https://api.openai.com", url).rstrip() + " --json\n"
        environment = {
            **{name: value for name, value in node_environment().items() if not name.startswith(PREFIX)},
            "PATH": f"{programs}:{node_environment()['PATH']}",
            "HOME": str(home),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "ANTHROPIC_BASE_URL": url,
            "GOOGLE_GEMINI_BASE_URL": url,
            "OPENAI_BASE_URL": f"{url}/v1",
        }
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PLAY_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict["reward"] == 1.0
    assert verdict["metrics"]["calls"] == 1.0
    assert verdict["labels"]["agent_isolation"] == "namespaces"
    if verdict["labels"]["agent_version"] != PRESETS[verdict["labels"]["agent"]].version:
        warnings.warn(f"{heading} is {verdict['labels']['agent_version']}: check what remains", stacklevel=1)
    assert list(home.iterdir()) == []
    assert others(requests) <= REMAINING[heading]


def others(requests: list[JsonObject]) -> set[str]:
    """The tools that a model was offered besides the task's."""
    names: set[str] = set()
    for request in requests:
        for tool in request.get("tools") or ():
            names |= (
                {tool["name"]} if "name" in tool else {each["name"] for each in tool["functionDeclarations"]}
            )
    return {name for name in names if "task" not in name}
