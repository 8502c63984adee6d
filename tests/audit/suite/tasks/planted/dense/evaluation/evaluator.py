"""A fault: pays for each file that is there, whatever it contains."""

from pathlib import Path

def evaluate(workspace):
    names = ("north.txt", "south.txt", "east.txt")
    return {"written": sum(Path(workspace, name).is_file() for name in names) / len(names)}
