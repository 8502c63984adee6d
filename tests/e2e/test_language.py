"""Tasks in Chinese use the files for that language, like upstream's `--cn_mode`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.probe.clients import playing
from tests.probe.serving import SUITE, serving

pytestmark = pytest.mark.anyio

EVALUATION = """\
import argparse, json
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()
config = json.loads(Path(arguments.res_log_file).read_text())["config"]
print(json.dumps([config["cn_mode"], config["task_str"], config["initialization"], config["evaluation"]]))
answer = (Path(arguments.groundtruth_workspace) / "answer.txt").read_text()
raise SystemExit((Path(arguments.agent_workspace) / "answer.txt").read_text() != answer)
"""
PREPROCESS = """\
import sys
from pathlib import Path

workspace = Path(sys.argv[sys.argv.index("--agent_workspace") + 1])
(workspace / "generated.txt").write_text("做好了")
"""
TASK = "tasks/probe/find-answer"


@pytest.fixture
def bilingual_suite(tmp_path: Path) -> Path:
    suite = tmp_path / "suite"
    shutil.copytree(SUITE, suite)
    for name, text in {
        "docs/task_cn.md": "写下答案。",
        "initial_workspace_cn/question.txt": "六乘七",
        "preprocess/main_cn.py": PREPROCESS,
        "evaluation/main_cn.py": EVALUATION,
        "groundtruth_workspace_cn/answer.txt": "四十二",
    }.items():
        path = suite / TASK / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return suite


async def test_prompt_workspace_preprocess_and_evaluation_are_in_chinese(
    bilingual_suite: Path, tmp_path: Path
) -> None:
    async with serving(
        tmp_path / "state", suite=(str(bilingual_suite),), provider="host", language="cn"
    ) as served:
        async with playing(served, "find-answer", "task") as player:
            assert (player.client.instructions or "").endswith("写下答案。")
            assert await player.text("probe__read", path="question.txt") == "六乘七"
            assert await player.text("probe__read", path="generated.txt") == "做好了"
            await player.call("probe__write", path="answer.txt", text="四十二")
            verdict = (await player.call("evaluate")).structured_content
    assert verdict["reward"] == 1.0
    module = "python3 -m tasks.probe.find-answer"
    for expected in (
        '[true, "\\u5199\\u4e0b\\u7b54\\u6848\\u3002"',
        f'"workspace": "{TASK}/initial_workspace_cn", "process_command": "{module}.preprocess.main_cn"',
        f'"groundtruth_workspace": "{TASK}/groundtruth_workspace_cn"',
        f'"evaluation_command": "{module}.evaluation.main_cn"',
    ):
        assert expected in verdict["evaluator_output"]
