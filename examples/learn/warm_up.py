"""The supervised part: teaches the form of calls, from transcripts of scripts that know no task.

A script lists what there is, then calls the other tool twice with names that the reply has, chosen by a rule.
Each rule is used as often; one of four is right. They play on the suite's own servers, without sandboxes.
"""

import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from examples.learn.model import Model
from examples.learn.text import CALL, END, REPLY, Tokenizer, call_text

SUITE = Path(__file__).parent / "suite"
CONTENT = {"restock-shelf": ("shelf", "stock.json"), "deliver-mail": ("office", "office.json")}
"""The function of each task's preprocess that makes its content, and the content's file."""

RATE = 4e-3
MISTAKES, OTHERS = 0.15, ("gold", "silver")
"""So often a script names what is not there, so that a model has seen what comes of it."""

Turn = tuple[str, str]
"""A call as the model writes it, and the reply."""


def load(path: str) -> ModuleType:
    """A module of the suite, which is no package of this project."""
    if str(SUITE) not in sys.path:
        sys.path.append(str(SUITE))
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), SUITE / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transcripts(seed: random.Random) -> Iterator[tuple[str, list[Turn]]]:
    """Attempts without end, each with its task: half of them at each task."""
    servers = load("local_servers/office_server")
    make = {
        task: getattr(load(f"tasks/learn/{task}/preprocess/main"), function)
        for task, (function, _) in CONTENT.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        while True:
            for task, (_, file) in CONTENT.items():
                for old in Path(folder).iterdir():
                    old.unlink()
                (Path(folder) / file).write_text(json.dumps(make[task](seed)))
                play = restock if task == "restock-shelf" else deliver
                desk = (servers.Shelf if task == "restock-shelf" else servers.Mail)(Path(folder))
                yield task, [*play(desk, seed), (call_text("claim_done", {}), "")]


def restock(shelf: Any, seed: random.Random) -> Iterator[Turn]:
    """Order two products of the list, by one of four rules."""
    listed = shelf.list()
    yield call_text("shelf__list", {}), listed
    lines = [line.split() for line in listed.splitlines()]
    by_count = [product for _, product in sorted(lines, key=lambda line: int(line[0]))]
    products = [product for _, product in lines]
    rules = [by_count[:2], by_count[-2:], products[:2], seed.sample(products, 2)]
    for product in shuffled(seed.choice(rules), seed):
        if seed.random() < MISTAKES:
            yield call_text("shelf__order", {"product": seed.choice(OTHERS)}), "no such product"
        yield call_text("shelf__order", {"product": product}), shelf.order(product)


def deliver(mail: Any, seed: random.Random) -> Iterator[Turn]:
    """Deliver two letters, to people who have one or to any, to their rooms or to any."""
    listed = mail.list()
    yield call_text("mail__list", {}), listed
    letters, *lines = listed.splitlines()
    rooms = dict(line.split() for line in lines)
    people, knows_rooms = seed.choice([letters.split()[2:], seed.sample([*rooms], 2)]), seed.random() < 0.5
    for name in (person.strip(",") for person in shuffled(people, seed)):
        room = rooms[name] if knows_rooms else seed.choice([*rooms.values()])
        if seed.random() < MISTAKES:
            wrong = {"name": seed.choice(OTHERS), "room": room}
            yield call_text("mail__deliver", wrong), "no such name or room"
        yield call_text("mail__deliver", {"name": name, "room": room}), mail.deliver(name, room)


def shuffled(values: Sequence[str], seed: random.Random) -> list[str]:
    return seed.sample(values, len(values))


def encoded(tokenizer: Tokenizer, turns: list[Turn]) -> list[int]:
    """The tokens of a transcript, as they are in a conversation."""
    ids: list[int] = []
    for call, reply in turns:
        ids += [CALL, *tokenizer.encode(call), END, REPLY, *tokenizer.encode(reply)]
    return ids


def warm_up(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Mapping[str, list[int]],
    seed: int,
    steps: int,
    shown: Callable[[int, float], None],
    batch: int = 8,
) -> None:
    """Supervised steps on scripted transcripts, `batch` of each task, their replies included."""
    attempts = transcripts(random.Random(f"warm-up {seed}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20, (steps - step) / (0.5 * steps))
        rows: dict[str, list[list[int]]] = {task: [] for task in prompts}
        for _ in range(batch * len(prompts)):
            task, turns = next(attempts)
            rows[task].append(encoded(tokenizer, turns))
        loss = torch.zeros(())
        for task, prompt in prompts.items():
            ids, there = padded(rows[task]), padded([[1] * len(row) for row in rows[task]])
            losses = -model.log_probabilities(prompt, ids) * there[:, 1:]
            loss = loss + losses.sum() / there.sum() / len(prompts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown(step + 1, loss.item())


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Rows as one tensor, with zeros at their ends."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
