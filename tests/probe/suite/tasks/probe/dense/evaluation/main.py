"""Passes if both files exist."""

import sys
from pathlib import Path

sys.exit(
    0
    if all(
        (Path(sys.argv[sys.argv.index("--agent_workspace") + 1]) / name).is_file()
        for name in ("a.txt", "b.txt")
    )
    else 1
)
