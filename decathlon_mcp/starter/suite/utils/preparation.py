"""Parses the command line of a preprocess."""

import argparse
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from utils.evaluation import launch_time


@dataclass(frozen=True)
class Episode:
    """A preprocess's input. Its output must depend on the launch time only."""

    workspace: Path
    launch_time: datetime


def episode() -> Episode:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent_workspace", required=True, type=Path)
    parser.add_argument("--launch_time", required=True, type=launch_time)
    arguments = parser.parse_args()
    return Episode(arguments.agent_workspace, arguments.launch_time)
