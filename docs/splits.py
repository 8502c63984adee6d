"""Divide the tasks of a checkout into `train` and `test`, balanced over what they need: names on stdout.

    python docs/splits.py path/to/Toolathlon > decathlon_mcp/suites/profiles/splits/toolathlon.yaml

What counts as a need is each server, each local tool, and of what kind the task is: whether it needs hosted
services, accounts, the internet, or nothing. By iterative stratification (Sechidis, Tsoumakas and Vlahavas
2011, "On the stratification of multi-label data"): of the needs that have tasks left the rarest is taken, and
its tasks go one by one to the split that lacks most of that need, then to the one that lacks most tasks.
Nothing is drawn: tasks are taken in the order of the SHA-256 of their names.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping

from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.splits import TRAIN_PERCENT
from decathlon_mcp.suites.tasks import Task

TEST_OF_108 = 28
SEARCH_KEY = "token.serper_api_key"
"""Searching the web needs a key, but no account that a task works on."""


def kind(task: Task) -> str:
    """What of the outside a task needs."""
    accounts = [name for name in task.needs.credentials if name != SEARCH_KEY]
    if task.needs.services:
        return "services and accounts" if accounts else "services"
    if accounts:
        return "accounts"
    return "internet" if task.needs.network else "nothing"


def labels_of(task: Task) -> frozenset[str]:
    """All that is to be balanced."""
    return frozenset(
        (f"kind:{kind(task)}", *task.needs.servers, *(f"local:{t}" for t in task.needs.local_tools))
    )


def divided(labels: Mapping[str, frozenset[str]], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tasks of each split, sorted. `labels`: of each task; `sizes`: how many each split is to have."""
    total = sum(sizes.values())
    room = dict(sizes)
    counts = Counter(label for each in labels.values() for label in each)
    lacking = {
        (split, label): counts[label] * size / total for split, size in sizes.items() for label in counts
    }
    left = sorted(labels, key=lambda name: hashlib.sha256(name.encode()).digest())
    found: dict[str, list[str]] = {split: [] for split in sizes}
    while left:
        remaining = Counter(label for name in left for label in labels[name])
        rarest = min(remaining, key=lambda label: (remaining[label], label), default=None)
        for name in [name for name in left if rarest is None or rarest in labels[name]]:
            split = max(
                (split for split in sizes if room[split] > 0),
                key=lambda split: (
                    lacking.get((split, rarest or ""), 0.0),
                    room[split] / sizes[split],
                    split,
                ),
            )
            found[split].append(name)
            room[split] -= 1
            left.remove(name)
            for label in labels[name]:
                lacking[split, label] -= 1
    return {split: sorted(names) for split, names in found.items()}


def main() -> None:
    suite = load_suite(sys.argv[1])
    labels = {name: labels_of(task) for name, task in suite.tasks.items()}
    test = TEST_OF_108 if len(labels) == 108 else round(len(labels) * (100 - TRAIN_PERCENT) / 100)
    found = divided(labels, {"train": len(labels) - test, "test": test})
    sys.stdout.write("# Made by docs/splits.py, which says how.\n")
    for split, names in found.items():
        sys.stdout.write(f"{split}:\n" + "".join(f"  - {name}\n" for name in names))
    shares = Counter(label for name in found["test"] for label in labels[name])
    counts = Counter(label for each in labels.values() for label in each)
    for label, count in sorted(counts.items(), key=lambda pair: (not pair[0].startswith("kind:"), -pair[1])):
        sys.stderr.write(f"{label}: {count - shares[label]} train, {shares[label]} test\n")


if __name__ == "__main__":
    main()
