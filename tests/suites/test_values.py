"""Token values, computed by the suite's own Python, and the secrets that a task does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
from decathlon_sandbox import wire

from decathlon_mcp.errors import SuiteError

if TYPE_CHECKING:
    from decathlon_mcp.suites.suite import Suite
    from tests.suites.conftest import Checkout

ADDICT = "class Dict(dict):\n    __getattr__ = dict.__getitem__\n"


def compute(suite: Suite) -> dict[str, str]:
    """Run the command in the suite's root with a channel, as the driver does."""
    reader, writer = os.pipe()
    command = suite.values_command(suite.tasks["find-paper"])
    assert command[: len(suite.profile.python)] == list(suite.profile.python)
    environment = {**os.environ, wire.CHANNEL_VARIABLE: str(writer)}
    arguments = [sys.executable, *command[len(suite.profile.python) :]]
    with os.fdopen(reader, encoding="utf-8") as channel:
        try:
            subprocess.run(
                arguments, cwd=suite.path, env=environment, pass_fds=(writer,), check=True, timeout=60
            )
        finally:
            os.close(writer)
        return suite.parse_values(channel.read())


def test_a_tasks_own_values_override_the_suites(checkout: Checkout) -> None:
    names = (
        "token.a",
        "token.b",
        "token.c",
        "token.missing",
        "token.none",
        "token.list",
        "podman_or_docker",
        "config.n",
    )
    arguments = ", ".join(f"'${{{name}}}'" for name in names)
    checkout.server("any", f"params: {{command: x, args: [{arguments}]}}")
    own = (
        "import os\nprint('noise')\n"
        "here = os.path.dirname(os.path.abspath(__file__))\n"
        "path = os.path.join(here, 'groundtruth_workspace', 'bucket.txt')\n"
        "all_token_key_session = dict(b=open(path).read().strip())\n"
    )
    files = {"token_key_session.py": own, "groundtruth_workspace/bucket.txt": "bucket-7\n"}
    checkout.task(servers=("any",), files=files)
    checkout.write("addict.py", ADDICT)
    checkout.write(
        "configs/token_key_session.py",
        "from addict import Dict\nprint('noise')\n"
        "all_token_key_session = Dict(a='1', b='2', c=True, none=None, list=[1], unused='u')\n",
    )
    checkout.write("configs/global_configs.py", "global_configs = dict(podman_or_docker='docker', n=3.5)\n")
    suite = checkout.load()
    assert compute(suite) == {
        "token.a": "1",
        "token.b": "bucket-7",
        "token.c": "True",
        "config.podman_or_docker": "docker",
        "config.n": "3.5",
    }


@pytest.mark.parametrize("channel", ["no json", '{"token.a": 1}'])
def test_invalid_channel_content_is_an_error(checkout: Checkout, channel: str) -> None:
    checkout.task()
    with pytest.raises(SuiteError, match="gave no values"):
        checkout.load().parse_values(channel)


ROOT = PurePosixPath("/episode")
SECRETS = """
profile: starter
secrets: [configs/token_key_session.py, configs/global_configs.py, configs/a.json, configs/b.json, configs/c]
stand_ins: {configs/token_key_session.py: configs/token_key_session_example.py}
servers:
  reader: {credentials: [configs/b.json]}
local_tools:
  searching: {credentials: [token.search_key]}
local_code: {searching: utils.tools:search, sleeping: utils.tools:sleep}
"""


def test_secrets_that_a_task_does_not_need_are_removed(checkout: Checkout) -> None:
    checkout.write("suite.yaml", SECRETS)
    checkout.server("reader")
    checkout.server("other")
    checkout.task("one", servers=("reader",), local_tools=("sleeping",))
    checkout.task("two", servers=("other",), local_tools=("searching",))
    suite = checkout.load()

    def removed(task: str, **values: str) -> dict[str, str | None]:
        secrets = suite.secrets_to_remove(suite.tasks[task], root=ROOT, values=values)
        return {str(path): stand_in and str(stand_in) for path, stand_in in secrets.items()}

    example = "configs/token_key_session_example.py"
    tokens = {"configs/token_key_session.py": example, "configs/global_configs.py": None}
    assert removed("one") == {**tokens, "configs/a.json": None, "configs/c": None}
    assert removed("one", x="configs/a.json", y=f"{ROOT}/configs/c/key") == tokens
    assert removed("two") == {"configs/a.json": None, "configs/b.json": None, "configs/c": None}
