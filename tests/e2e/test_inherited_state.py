"""What processes of a task inherit, compared with what they inherit in a container of upstream's scripts."""

from __future__ import annotations

import base64
import json
import subprocess
import zlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from decathlon_client import Decathlon

pytestmark = [pytest.mark.anyio, pytest.mark.docker]
SUITE = Path(__file__).parent / "suite"
ROOT = "/episode"
States = dict[str, dict[str, Any]]
PROCESSES = ("preprocess", "server", "server's child", "evaluator")
SHELLS = ("preprocess", "evaluator")
"""Upstream starts them by a shell."""
CONTAINERS = ("docker",)
IMAGES = ("image", "gvisor")
MACHINE = ("namespaces", "none")
"""Whose files and variables are the machine's."""
ISOLATED = (*CONTAINERS, *IMAGES, "namespaces")
EVERYWHERE = (*ISOLATED, "none")


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of the state that differs on purpose. `name` may have `*`."""

    name: str
    reason: str
    providers: tuple[str, ...] = EVERYWHERE
    processes: tuple[str, ...] = PROCESSES


DIFFERENCES = (
    Difference("host name", "upstream has that of the machine; here every sandbox has its own"),
    Difference("variable HOSTNAME", "as the host name", ISOLATED),
    Difference("variable DECATHLON_MARK", "by which the driver finds a program's daemons"),
    Difference(
        "variable PYTHONDONTWRITEBYTECODE", "the profile `starter` sets it: no new files in a checkout"
    ),
    Difference("variable SHLVL", "no shell between the driver and the program", processes=SHELLS),
    Difference("variable _", "no shell between the driver and the program", processes=SHELLS),
    Difference("variable GIT_*", "git runs no program that a workspace names", processes=("evaluator",)),
    Difference("variable HGRCSKIPREPO", "Mercurial neither", processes=("evaluator",)),
    Difference("variable PYTHON*", "only image and suite say where modules are", processes=("evaluator",)),
    Difference("descriptor *", "the channel for the exception that ended it", processes=("evaluator",)),
    Difference("status Cap*", "root in a sandbox has no capabilities", ISOLATED),
    Difference("status NoNewPrivs", "nor gets any by a program", ISOLATED),
    Difference("folder /tmp", "in memory, with a limit", ISOLATED),
    Difference("folder /var/tmp", "in memory, with a limit", (*IMAGES, "namespaces")),
    Difference("folder /dev/shm", "programs in it may be run", (*IMAGES, "namespaces")),
    Difference("folder /root", "in memory, with a limit", IMAGES),
    Difference("folder /", "all sandboxes share an image that is read-only", (*IMAGES, "namespaces")),
    Difference("devices", "no message queues; those of gVisor's kernel", (*IMAGES, "namespaces")),
    Difference("status Groups", "a user namespace has no supplementary groups", (*IMAGES, *MACHINE)),
    Difference("user", "a user namespace has no supplementary groups", (*IMAGES, "none")),
    Difference("limit NOFILE", "that of containers in most engines", ("gvisor",)),
    Difference("limit NPROC", "the limit of processes", ("gvisor",)),
    Difference("limit CORE", "gVisor writes no core files", ("gvisor",)),
    Difference("limit MEMLOCK", "gVisor locks no memory", ("gvisor",)),
    Difference("limit SIGPENDING", "gVisor does not limit queued signals", ("gvisor",)),
    Difference("personality", "not in gVisor's /proc", ("gvisor",)),
    Difference("status *", "gVisor's /proc shows few", ("gvisor",)),
    Difference("user", "programs run as an ordinary user, in a home of their own", ("namespaces",)),
    Difference("status ?id", "programs run as an ordinary user", ("namespaces",)),
    Difference("home", "a home of their own", ("namespaces",)),
    Difference("variable HOME", "a home of their own", ("namespaces",)),
    Difference("folder /root", "a home of their own", ("namespaces",)),
    Difference("folder /home/agent", "a home of their own", ("namespaces",)),
    Difference("variable PATH", "the server's Python first", MACHINE),
    Difference("variable LANG", "the server's", MACHINE),
    Difference("locale", "the server's", MACHINE),
    Difference("time zone", "the machine's", MACHINE),
    Difference("limit *", "the server's", MACHINE),
    Difference("variable *", "an ordinary process of the user's", ("none",)),
    Difference("status Cap*", "an ordinary process of the user's", ("none",)),
    Difference("status Seccomp", "an ordinary process of the user's", ("none",)),
    Difference("status Umask", "an ordinary process of the user's", ("none",)),
    Difference("folder *", "the machine's", ("none",)),
    Difference("devices", "the machine's", ("none",)),
    Difference("working directory", "a folder for each sandbox", ("none",)),
)
"""What differs on purpose. Everything else is compared."""


@pytest.fixture(scope="module")
def upstream(test_image: str) -> States:
    """The states in a container as `scripts/run_single_containerized.sh` makes it, but without a network."""
    command = ["docker", "run", "--detach", "--rm", "--network", "none", "--workdir", ROOT, test_image]
    container = _output([*command, "sleep", "600"]).strip()
    try:
        _output(["docker", "cp", "--quiet", f"{SUITE}/.", f"{container}:{ROOT}"])
        return json.loads(_output(["docker", "exec", container, "bash", "-c", "python3 upstream.py"]))
    finally:
        _output(["docker", "rm", "--force", container])


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


async def states_of(tmp_path: Path, provider: str, **settings: Any) -> States:
    async with (
        Decathlon.embedded(SUITE, provider, state=tmp_path, names="raw", **settings) as d,
        d.episode("state") as episode,
    ):
        states = json.loads((await episode.call("states", {})).text)
        await episode.claim_done()
        verdict = await episode.evaluate()
        output = verdict.raw["evaluator_output"]
        return states | {"evaluator": json.loads(zlib.decompress(base64.b64decode(output)))}


@pytest.mark.parametrize("provider", ["docker", "image", "gvisor", "namespaces", "none"])
async def test_processes_inherit_what_they_inherit_upstream(
    provider: str, tmp_path: Path, upstream: States, request: pytest.FixtureRequest
) -> None:
    settings: dict[str, Any] = {}
    if provider == "gvisor":
        request.getfixturevalue("runsc")
        settings["kernel"] = "gvisor"
    if provider in IMAGES:
        settings["image"] = request.getfixturevalue("unpacked_image")
    elif provider != "docker":
        settings["isolation"] = provider
    found = await states_of(tmp_path, "docker" if provider == "docker" else "host", **settings)
    assert found.keys() == upstream.keys()
    unexplained = [
        f"{process}: {name}: {upstream[process].get(name)!r} upstream, {found[process].get(name)!r} here"
        for process in upstream
        for name in sorted(upstream[process].keys() | found[process].keys())
        if upstream[process].get(name) != found[process].get(name) and not reason_for(provider, process, name)
    ]
    assert not unexplained, "\n".join(unexplained)


def reason_for(provider: str, process: str, name: str) -> str | None:
    """Why this may differ; None if it may not."""
    for row in DIFFERENCES:
        if provider in row.providers and process in row.processes and fnmatchcase(name, row.name):
            return row.reason
    return None
