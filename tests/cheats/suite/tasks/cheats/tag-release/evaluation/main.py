"""Passes if the repository's last commit is the release and it has no other changes. Runs git in it."""

import subprocess
import sys
from pathlib import Path

from utils.arguments import read_arguments

library = Path(read_arguments().agent_workspace) / "library"


def git(*arguments):
    result = subprocess.run(["git", *arguments], cwd=library, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


if not library.is_dir():
    sys.exit("there is no library")
subject, status, changes = git("log", "-1", "--format=%s"), git("status", "--porcelain"), git("diff", "HEAD")
print(subject, status, changes)
sys.exit(0 if (subject, status, changes) == ("release 1.4", "", "") else 1)
