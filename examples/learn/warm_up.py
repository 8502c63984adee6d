"""The supervised part: teaches the form of calls, from transcripts of scripts that know no task.

A script lists what there is, then calls the other tool for the two lines of one state or kind, any of the
three: one script in three is right, and not all that deliver know the rooms. They play on the suite's own
servers, without sandboxes.
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

RATE, REPLIES = 4e-3, 0.1
"""The learning rate, and how much a token of a reply counts beside one of a call."""
MISTAKES, OTHERS = 0.05, ("gold", "silver")
"""So often a script names what is not there, so that a model has seen what comes of it."""
KNOWN = 0.7
"""So many of the scripts that deliver know the rooms."""

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
    """Order the products in one of the three states."""
    listed = shelf.list()
    yield call_text("shelf__list", {}), listed
    for state, product in chosen(listed, seed):
        if seed.random() < MISTAKES:
            wrong = seed.choice(OTHERS)
            yield call_text("shelf__order", {"state": state, "product": wrong}), f"no {state} {wrong}"
        yield call_text("shelf__order", {"state": state, "product": product}), shelf.order(state, product)


def deliver(mail: Any, seed: random.Random) -> Iterator[Turn]:
    """Deliver the letters of one of the three kinds, to their rooms or to any."""
    listed = mail.list()
    yield call_text("mail__list", {}), listed
    rooms = [line.split()[2] for line in listed.splitlines()]
    knows_rooms = seed.random() < KNOWN
    for kind, name, its_room in chosen(listed, seed):
        words = {"kind": kind, "name": name, "room": its_room if knows_rooms else seed.choice(rooms)}
        if seed.random() < MISTAKES:
            wrong = seed.choice(OTHERS)
            yield call_text("mail__deliver", {**words, "name": wrong}), f"no {kind} {wrong}"
        yield call_text("mail__deliver", words), mail.deliver(**words)


def chosen(listed: str, seed: random.Random) -> list[list[str]]:
    """The words of the lines that start with the same word; each first word is as likely."""
    lines = [line.split() for line in listed.splitlines()]
    first = seed.choice(sorted({line[0] for line in lines}))
    return [line for line in lines if line[0] == first]


def encoded(tokenizer: Tokenizer, turns: list[Turn]) -> tuple[list[int], list[float]]:
    """The tokens of a transcript, as they are in a conversation, and how much each counts."""
    ids: list[int] = []
    weights: list[float] = []
    for call, reply in turns:
        written, read = [*tokenizer.encode(call), END], [REPLY, *tokenizer.encode(reply)]
        ids += [CALL, *written, *read]
        weights += [0.0, *[1.0] * len(written), *[REPLIES] * len(read)]
    return ids, weights


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
        rows: dict[str, list[tuple[list[int], list[float]]]] = {task: [] for task in prompts}
        for _ in range(batch * len(prompts)):
            task, turns = next(attempts)
            rows[task].append(encoded(tokenizer, turns))
        loss = torch.zeros(())
        for task, prompt in prompts.items():
            ids, weights = map(padded, zip(*rows[task], strict=True))
            losses = -model.log_probabilities(prompt, ids) * weights[:, 1:]
            loss = loss + losses.sum() / weights.sum() / len(prompts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown(step + 1, loss.item())


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Rows as one tensor, with zeros at their ends."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
