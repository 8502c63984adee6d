"""Splits a checkout's tasks into `train` and `test`, balanced over what they need. Writes YAML to stdout.

    python docs/splits.py path/to/Toolathlon > decathlon_mcp/plugins/toolathlon/profiles/splits/NAME.yaml

Balanced are the servers, the local tools, and the kind of each task: whether it needs hosted services,
accounts, the internet, or none of these. The method is iterative stratification (Sechidis, Tsoumakas and
Vlahavas 2011, "On the stratification of multi-label data"): of the labels of the unassigned tasks take the
rarest, and assign its tasks one by one to the split that lacks most of that label, in a tie to the split that
lacks most tasks. Nothing is random: tasks are taken in the order of the SHA-256 of their names.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping

from decathlon_mcp.suites.loading import TRAIN_PERCENT, load_suite
from decathlon_mcp.suites.tasks import Task

TOOLATHLON_TASKS = 108
TOOLATHLON_TEST_TASKS = 28
SEARCH_KEY = "token.serper_api_key"
"""Web search needs a key, but tasks do not work on its account."""


def kind(task: Task) -> str:
    """The external resources that a task needs."""
    accounts = [name for name in task.needs.credentials if name != SEARCH_KEY]
    if task.needs.services:
        return "services and accounts" if accounts else "services"
    if accounts:
        return "accounts"
    return "internet" if task.needs.network else "nothing"


def labels_of(task: Task) -> frozenset[str]:
    """The labels to balance."""
    local_tools = (f"local:{name}" for name in task.needs.local_tools)
    return frozenset((f"kind:{kind(task)}", *task.needs.servers, *local_tools))


def stratify(labels: Mapping[str, frozenset[str]], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tasks of each split, sorted. `labels`: by task; `sizes`: the number of tasks of each split."""
    total = sum(sizes.values())
    free = dict(sizes)
    counts = Counter(label for task_labels in labels.values() for label in task_labels)
    lacking = {
        (split, label): counts[label] * size / total for split, size in sizes.items() for label in counts
    }
    unassigned = sorted(labels, key=lambda name: hashlib.sha256(name.encode()).digest())
    splits: dict[str, list[str]] = {split: [] for split in sizes}
    while unassigned:
        remaining = Counter(label for name in unassigned for label in labels[name])
        rarest = min(remaining, key=lambda label: (remaining[label], label), default=None)
        for name in [name for name in unassigned if rarest is None or rarest in labels[name]]:
            split = max(
                (split for split in sizes if free[split] > 0),
                key=lambda split: (
                    lacking.get((split, rarest or ""), 0.0),
                    free[split] / sizes[split],
                    split,
                ),
            )
            splits[split].append(name)
            free[split] -= 1
            unassigned.remove(name)
            for label in labels[name]:
                lacking[split, label] -= 1
    return {split: sorted(names) for split, names in splits.items()}


def main() -> None:
    suite = load_suite(sys.argv[1])
    labels = {name: labels_of(task) for name, task in suite.tasks.items()}
    test = round(len(labels) * (100 - TRAIN_PERCENT) / 100)
    if len(labels) == TOOLATHLON_TASKS:
        test = TOOLATHLON_TEST_TASKS
    splits = stratify(labels, {"train": len(labels) - test, "test": test})
    sys.stdout.write("# Made by docs/splits.py, which describes the method.\n")
    for split, names in splits.items():
        sys.stdout.write(f"{split}:\n" + "".join(f"  - {name}\n" for name in names))
    in_test = Counter(label for name in splits["test"] for label in labels[name])
    counts = Counter(label for task_labels in labels.values() for label in task_labels)
    for label, count in sorted(counts.items(), key=lambda pair: (not pair[0].startswith("kind:"), -pair[1])):
        sys.stderr.write(f"{label}: {count - in_test[label]} train, {in_test[label]} test\n")


if __name__ == "__main__":
    main()
