"""Whether note.txt has the right answer."""

import argparse
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--agent_workspace", type=Path, required=True)
workspace = parser.parse_known_args()[0].agent_workspace
note = workspace / "note.txt"
sys.exit(not (note.is_file() and note.read_text() == "right"))
