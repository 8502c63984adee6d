"""Upstream's own evaluation of a workspace, in a container like that of upstream's scripts."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.suites.suite import Suite

EVALUATION_SECONDS = 900
"""Half an evaluator's deadline here: it includes the container's start and upstream's preprocess."""
# The checkout's files over the image's /workspace. Preprocess may write into the task's folder; its
# workspace is not looked at.
_EVALUATE = """
set -e
grep -q localhost /etc/hosts || echo 127.0.0.1 localhost >>/etc/hosts
tar -x -C /workspace
cd /workspace
for name in configs/global_configs configs/token_key_session; do
    [ -e $name.py ] || [ ! -e ${name}_example.py ] || cp ${name}_example.py $name.py
done
if [ -n "$PREPROCESS" ] && [ -e $FOLDER/preprocess/main.py ]; then
    mkdir -p dumps/fresh
    [ ! -e $FOLDER/initial_workspace ] || cp -r $FOLDER/initial_workspace/. dumps/fresh
    $RUN $MODULE.preprocess.main --agent_workspace $PWD/dumps/fresh --launch_time "$FIRST_TIME" || exit 99
fi
truth=$FOLDER/groundtruth_workspace
[ -e $truth ] || truth=None
$RUN $MODULE.evaluation.main --res_log_file dumps/traj_log.json --agent_workspace $PWD/dumps/workspace \
    --groundtruth_workspace $truth --launch_time "$LAUNCH_TIME"
"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What upstream's command did: its exit code, where 0 is a pass, and its output."""

    exit_code: int
    output: str


def evaluate(episode: Episode, suite: Suite, image: str) -> Evaluation:
    """Run upstream's command for an episode in progress, on a copy of its workspace.

    With services, the evaluator has the network of the episode's own, and upstream's preprocess does not run
    again: it has filled the services. Raises CalledProcessError or TimeoutExpired.
    """
    spec, profile = episode.spec, suite.profile
    task = spec.task
    # The sandbox of preprocess, if processes that it left running keep it.
    workspace = f"decathlon-{episode.records.progress.agent}:{profile.root}/{profile.workspace}"
    launch_time = suite.launch_time(spec.launch_time)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        (tree / "dumps").mkdir()
        subprocess.run(["docker", "cp", "--quiet", workspace, tree / "dumps"], check=True)
        # What the evaluators read of upstream's log.
        log: dict[str, object] = {
            "status": "success",
            "config": {"launch_time": launch_time},
            "messages": [],
            "tool_calls": {},
        }
        (tree / "dumps/traj_log.json").write_text(json.dumps(log))
        packed = tree / "tree.tar"
        with tarfile.open(packed, "w") as tar:
            tar.add(tree / "dumps", "dumps")
            for part in (*map(str, profile.common), str(task.folder)):
                if (suite.path / part).exists():
                    tar.add(suite.path / part, part)
        services = task.needs.services
        network = f"container:decathlon-{spec.public_id}-{services[0]}" if services else "none"
        environment = {
            **dict(profile.environment),
            "RUN": " ".join(profile.run_module),
            "FOLDER": str(task.folder),
            "MODULE": str(task.folder).replace("/", "."),
            "LAUNCH_TIME": launch_time,
            "FIRST_TIME": suite.preprocess_launch_time(spec.launch_time),
            "PREPROCESS": "" if services else "yes",
        }
        variables = [word for item in environment.items() for word in ("--env", "=".join(item))]
        command = ["docker", "run", "--rm", "--interactive", "--network", network, *variables, image]
        with packed.open("rb") as stdin:
            done = subprocess.run(
                [*command, "bash", "-c", _EVALUATE],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=EVALUATION_SECONDS,
            )
    return Evaluation(done.returncode, done.stdout.decode("utf-8", "replace"))
