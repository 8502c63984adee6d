"""The metrics `share`, of the urgent letters that were delivered, and `people`, whatever the room was.

What else was delivered costs half as much.
"""

import json
from pathlib import Path

from utils.office import lines_of, share


def evaluate(workspace: Path, groundtruth: Path) -> dict[str, float]:
    office = json.loads((groundtruth / "office.json").read_text())
    lines = lines_of(workspace / "deliveries.txt")
    urgent = {name for name, kind in office["letters"].items() if kind == "urgent"}
    expected = {f"{name} {office['rooms'][name]}" for name in urgent}
    people = share([line.split()[0] for line in lines if line], urgent)
    return {"share": share(lines, expected), "people": people}
