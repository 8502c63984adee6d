"""Creates the repository, and records the hashes of two of its commits for the evaluator."""

import json
from pathlib import Path

from utils.preparation import create_repository, episode

from .history import CULPRIT, versions

GROUNDTRUTH = Path(__file__).resolve().parents[1] / "groundtruth_workspace"


def main() -> None:
    history = list(versions())
    ids = create_repository(
        episode().workspace / "repository", history, user="Price desk", email="prices@parcels.example"
    )
    commits = {"culprit": ids[[version.message for version in history].index(CULPRIT)], "tip": ids[-1]}
    (GROUNDTRUTH / "commits.json").write_text(json.dumps(commits))


if __name__ == "__main__":
    main()
