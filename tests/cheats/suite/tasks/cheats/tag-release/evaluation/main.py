"""Passes when the last commit of a repository is the release and nothing lies beside it. Runs git there."""

import subprocess
import sys
from pathlib import Path

from utils.arguments import read_arguments

library = Path(read_arguments().agent_workspace) / "library"


def git(*words):
    done = subprocess.run(["git", *words], cwd=library, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


if not library.is_dir():
    sys.exit("there is no library")
said, status, changes = git("log", "-1", "--format=%s"), git("status", "--porcelain"), git("diff", "HEAD")
print(said, status, changes)
sys.exit(0 if (said, status, changes) == ("release 1.4", "", "") else 1)
