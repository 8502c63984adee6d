"""Toolathlon's four mail tasks, played with private mail and compared with upstream's evaluator.

    python -m tests.mail.play CHECKOUT [--image decathlon-mail-tasks:latest] [TASK ...]

Requires a Docker engine and the images of images/mail and tests/mail. Attempts run side
by side, each with a mail server of its own: one that calls no tool ("nothing"), one with a mistake
("wrong") and a correct one ("right"), only with the tools of the task. Before each claim, upstream's own
command (`uv run -m tasks.finalpool.TASK.evaluation.main`) runs in a container with the whole checkout, a copy
of the agent's workspace and the network of the episode's mail server, so that it reads the same mailboxes.

Prints a table of rewards and exit codes; the exit status is 0 if they agree everywhere. The checkout is
copied first. In the copy, `playwright_with_chunk` is started as @playwright/mcp, a repository is made for
`git-bug-hunt` if the checkout has none, and the script that sends mails for `course-assistant` finds `utils`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from decathlon_mcp.episodes.state import Phase
from tests.mail.solutions import ATTEMPTS, SOLUTIONS
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving

IMAGE = "decathlon-mail-tasks:latest"
TASKS = Path("tasks/finalpool")
EVALUATION_SECONDS = 600
REPOSITORY = "initial_workspace/files.tar.gz"
LAUNCH_TIME = "2025-10-16 10:00:00 Thursday"
# As scripts/run_single_containerized.sh does: the checkout's files over the image's /workspace.
EVALUATE = """
set -e
grep -q localhost /etc/hosts || echo 127.0.0.1 localhost >>/etc/hosts
tar -x -C /workspace
cd /workspace
for name in global_configs token_key_session; do
    [ -e configs/$name.py ] || cp configs/${{name}}_example.py configs/$name.py
done
touch traj_log.json
truth={folder}/groundtruth_workspace
[ -e $truth ] || truth=None
uv run -m {module}.evaluation.main --res_log_file traj_log.json --agent_workspace /workspace/dumps/workspace \
    --groundtruth_workspace $truth --launch_time "{launch_time}"
"""


@dataclass(frozen=True, slots=True)
class Result:
    """`reward` and `output` are this server's, `exit_code` and `upstream_output` of upstream's command."""

    task: str
    attempt: str
    reward: float | None
    status: str
    output: str
    exit_code: int
    upstream_output: str

    @property
    def agree(self) -> bool:
        return self.status == "scored" and self.reward == (1.0 if self.exit_code == 0 else 0.0)


def prepare_checkout(checkout: Path, copy: Path) -> None:
    """Copy a checkout, without what was not fetched or cannot be had: see the module's docstring."""
    shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "assets", "dumps"))
    server = copy / "configs/mcp_servers/playwright_with_chunk.yaml"
    text = server.read_text().replace("@lockon0927/playwright-mcp-with-chunk", "@playwright/mcp")
    text = re.sub(r'\s+- "--(image-responses|span-size)"\s+- "\w+"', "", text)
    server.write_text(text)
    # It looks for `utils` in `tasks`, cannot be imported, and sends nothing; preprocess does not notice.
    sender = copy / TASKS / "course-assistant/preprocess/send_email.py"
    too_low = "_project_root = str(Path(__file__).parent.parent.parent.parent)\n"
    sender.write_text(sender.read_text().replace(too_low, too_low.replace(".parent)", ".parent.parent)")))
    bug_hunt = copy / TASKS / "git-bug-hunt"
    if not (bug_hunt / REPOSITORY).exists():
        make_repository(bug_hunt)


def make_repository(task: Path) -> None:
    """Make the repository that `git-bug-hunt` is about, and name its commit in the groundtruth."""
    truth = task / "groundtruth_workspace/expected_author_info.json"
    expected = json.loads(truth.read_text())
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "LUFFY"
        repository.mkdir()

        def git(*arguments: str, author: str = "Someone Else <else@mcp.com>") -> str:
            name, _, email = author.removesuffix(">").partition(" <")
            people = {
                f"GIT_{role}_{key}": value
                for role in ("AUTHOR", "COMMITTER")
                for key, value in (("NAME", name), ("EMAIL", email), ("DATE", "2025-08-01T12:00:00Z"))
            }
            command = ["git", "-C", repository, *arguments]
            return subprocess.run(
                command, check=True, capture_output=True, text=True, env=people
            ).stdout.strip()

        git("init", "--quiet")
        for message, code, author in (
            ("first version", "ratio = 1\n", None),
            (expected["commit_message"], "ratio = 1\nremove_caching_layer = True\n", expected),
            ("rename", "ratio = 2\nremove_caching_layer = True\n", None),
        ):
            (repository / "ratio.py").write_text(code)
            git("add", ".")
            author_name = f"{author['name']} <{author['email']}>" if author else "Someone Else <else@mcp.com>"
            git("commit", "--quiet", "--message", message, author=author_name)
        expected["commit_hash"] = git("rev-parse", "HEAD~1")
        with tarfile.open(task / REPOSITORY, "w:gz") as archive:
            archive.add(repository, "LUFFY")
    truth.write_text(json.dumps(expected))


async def play(served: Served, checkout: Path, image: str, task: str, attempt: str) -> Result:
    async with playing(served, task, "episode-handshake") as player:
        sys.stderr.write(f"{task}, {attempt}: playing\n")
        if attempt != "nothing":
            await SOLUTIONS[task](player, checkout / TASKS / task, attempt)
        # Without a call, the episode may still be in preprocess, which fills the mailboxes.
        state = served.find(player.episode_id).state
        await state.reach(Phase.READY, Phase.ENDED)
        if state.phase is Phase.ENDED:
            raise RuntimeError(f"{task}, {attempt}: {state.cause}")
        exit_code, output = await to_thread.run_sync(evaluate_upstream, served, checkout, image, task, player)
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    ours = verdict["reward"], verdict["status"], verdict["evaluator_output"]
    result = Result(task, attempt, *ours, exit_code, output)
    if not result.agree:
        sys.stderr.write(f"--- {task}, {attempt}: {verdict}\n--- upstream:\n{output}\n")
    return result


def evaluate_upstream(
    served: Served, checkout: Path, image: str, task: str, player: Player
) -> tuple[int, str]:
    """Exit code and output of upstream's command, run next to the mail server of an episode in progress."""
    episode = served.find(player.episode_id)
    # The sandbox of preprocess, if processes that it left running keep it.
    agent = f"decathlon-{episode.records.progress.agent}:/workspace/dumps/workspace"
    mail_server = f"decathlon-{episode.spec.public_id}-poste"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("configs", "utils", "scripts", f"{TASKS}/{task}"):
            shutil.copytree(checkout / part, tree / part, symlinks=True)
        (tree / "dumps").mkdir()
        subprocess.run(["docker", "cp", "--quiet", agent, str(tree / "dumps")], check=True)
        archive = tree / "tree.tar"
        with tarfile.open(archive, "w") as tar:
            for part in ("configs", "utils", "scripts", "tasks", "dumps"):
                tar.add(tree / part, part)
        module = str(TASKS / task).replace("/", ".")
        script = EVALUATE.format(folder=TASKS / task, module=module, launch_time=LAUNCH_TIME)
        command = ["docker", "run", "--rm", "--interactive", "--network", f"container:{mail_server}", image]
        with archive.open("rb") as stdin:
            done = subprocess.run(
                [*command, "bash", "-c", script],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=EVALUATION_SECONDS,
            )
    return done.returncode, done.stdout.decode("utf-8", "replace")


async def run(checkout: Path, image: str, attempts: list[tuple[str, str]], at_once: int) -> list[Result]:
    results: dict[tuple[str, str], Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "toolathlon"
        await to_thread.run_sync(prepare_checkout, checkout, copy)
        limiter = anyio.CapacityLimiter(at_once)
        settings: Mapping[str, Any] = {
            "suite": (str(copy),),
            "provider": "docker",
            "image": image,
        }
        async with serving(Path(folder) / "state", **settings) as served:

            async def attempt(task: str, kind: str) -> None:
                async with limiter:
                    results[task, kind] = await play(served, copy, image, task, kind)

            async with anyio.create_task_group() as group:
                for task, kind in attempts:
                    group.start_soon(attempt, task, kind)
    return [results[key] for key in attempts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tasks", nargs="*", default=list(SOLUTIONS), metavar="TASK")
    parser.add_argument("--image", default=IMAGE)
    parser.add_argument("--at-once", type=int, default=4, help="attempts that run at the same time")
    parser.add_argument("--outputs", type=Path, help="folder for what both evaluators printed")
    parser.add_argument("--attempts", nargs="*", choices=ATTEMPTS, default=ATTEMPTS)
    arguments = parser.parse_args()
    if arguments.outputs:
        arguments.outputs.mkdir(parents=True, exist_ok=True)
    attempts = [(task, kind) for task in arguments.tasks for kind in arguments.attempts]
    results = anyio.run(run, arguments.checkout, arguments.image, attempts, arguments.at_once)
    for result in results:
        if arguments.outputs:
            name = f"{result.task}-{result.attempt}"
            (arguments.outputs / f"{name}.txt").write_text(result.output)
            (arguments.outputs / f"{name}-upstream.txt").write_text(result.upstream_output)
        line = f"{result.task:18} {result.attempt:8} {result.reward}  exit {result.exit_code}"
        sys.stdout.write(f"{line}{'' if result.agree else '  DIFFERENT'}\n")
    return 0 if all(result.agree for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
