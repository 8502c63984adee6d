"""Writes the state of preprocess into the workspace."""

import argparse
import json
from pathlib import Path

from utils.inherited_state import state

parser = argparse.ArgumentParser()
parser.add_argument("--agent_workspace")
parser.add_argument("--launch_time")
Path(parser.parse_args().agent_workspace, "preprocess.json").write_text(json.dumps(state()))
