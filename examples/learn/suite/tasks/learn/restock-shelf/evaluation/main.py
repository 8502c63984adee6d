"""The metric `share`: which part of what is gone was ordered. What else was ordered costs half as much."""

import json
from pathlib import Path

from utils.office import lines_of, share


def evaluate(workspace: Path, groundtruth: Path) -> dict[str, float]:
    stock = json.loads((groundtruth / "stock.json").read_text())
    gone = {product for product, state in stock.items() if state == "gone"}
    return {"share": share(lines_of(workspace / "orders.txt"), gone)}
