"""A copy of a checkout, with what cannot be had replaced."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tools.fidelity import gym
from tools.fidelity.files import TASKS

_REPOSITORY = "initial_workspace/files.tar.gz"
_SORTED_FILES = "initial_workspace/initial_workspace.tar.gz"
_READS_ACCOUNT = r'(?s)if os\.path\.exists\("\./configs/google_credentials\.json"\).*?json\.load\(f\)\n'
_NO_ACCOUNT = 'google_credentials = dict.fromkeys(("client_id", "client_secret", "refresh_token"), "none")\n'
CHANGES = {
    "arrange-workspace": "an archive with one file, if the checkout lacks the task's",
    "course-assistant": "the script that sends mails finds `utils`",
    "git-bug-hunt": "a small repository with a commit to find, if the checkout lacks the task's",
    "meeting-assign": "`playwright_with_chunk` is started as `@playwright/mcp`",
}
"""What differs in the copy, by task."""


def prepare_checkout(checkout: Path, copy: Path) -> None:
    """Copy a checkout, without its history and with the changes above."""
    shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "assets", "dumps"))
    if not (copy / TASKS / "git-bug-hunt").exists():
        gym.leave_out_the_database(copy)
        return
    server = copy / "configs/mcp_servers/playwright_with_chunk.yaml"
    text = server.read_text().replace("@lockon0927/playwright-mcp-with-chunk", "@playwright/mcp")
    text = re.sub(r'\s+- "--(image-responses|span-size)"\s+- "\w+"', "", text)
    server.write_text(text)
    # Before Toolathlon-Verified, every task reads the file of a Google account, and fails without one.
    keys = copy / "configs/token_key_session_example.py"
    if 'raise ValueError("No google credentials' in keys.read_text():
        keys.write_text(re.sub(_READS_ACCOUNT, _NO_ACCOUNT, keys.read_text()))
    # In one fork it looks for `utils` in `tasks`, is not imported and sends nothing, unnoticed.
    sender = copy / TASKS / "course-assistant/preprocess/send_email.py"
    too_low = "_project_root = str(Path(__file__).parent.parent.parent.parent)\n"
    sender.write_text(sender.read_text().replace(too_low, too_low.replace(".parent)", ".parent.parent)")))
    if not (copy / TASKS / "git-bug-hunt" / _REPOSITORY).exists():
        make_repository(copy / TASKS / "git-bug-hunt")
    files = copy / TASKS / "arrange-workspace" / _SORTED_FILES
    if not files.exists():
        files.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile() as empty, tarfile.open(files, "w:gz") as archive:
            archive.add(empty.name, "initial_workspace_arrange/unsorted.txt")


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
        with tarfile.open(task / _REPOSITORY, "w:gz") as archive:
            archive.add(repository, "LUFFY")
    truth.write_text(json.dumps(expected))
