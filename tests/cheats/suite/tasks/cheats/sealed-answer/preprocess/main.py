"""Draws a seed and leaks the answer into files, stdout, the environment and a process that keeps running."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

from utils.arguments import read_arguments

from ..answers import answer_for

here = Path(__file__).resolve().parent.parent
seed = secrets.token_hex(16)
answer = answer_for(seed)
(Path(read_arguments().agent_workspace) / "seed.txt").write_text(seed)

(here / "groundtruth_workspace" / "answer.txt").write_text(answer)
(here / "draft.txt").write_text(answer)
print("the answer is", answer)
os.environ["ANSWER"] = answer
holder = (
    f"import time; answer, kept = '{answer}', open('draft'); import os; os.unlink('draft'); time.sleep(3600)"
)
(here / "draft").write_text(answer)
subprocess.Popen([sys.executable, "-c", holder, answer], cwd=here, start_new_session=True)
