"""GRPO on a server's episodes: groups of eight attempts, played, graded, and compared with each other.

An update raises the probability of what was sampled in attempts that are better than their group, and lowers
it in the others. Everything else is the server's: tasks, sandboxes, calls, rewards.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import torch
from decathlon_client import Decathlon, Episode, RequestError, Task
from torch import Tensor

from examples.learn.model import Conversation, Model, Past, read_weights, write_weights
from examples.learn.record import Group, Record, held_out_figures
from examples.learn.text import CALL, REPLY, Tokenizer, prompt_text, split_call, transcript_texts
from examples.learn.warm_up import padded, transcripts, warm_up

GROUP = 8
MAX_TURNS, MAX_TOKENS, MAX_REPLY_TOKENS = 6, 24, 60
"""Turns of an attempt, tokens of a turn, and tokens of a reply that the model is shown."""
CLIP = (0.8, 1.28)
"""By so much an update may change the probability of a token."""
MASTERED, LAST = 0.95, 64
"""A task that was passed more often in so many of its last episodes is not drawn any more."""
TRAINING, HELD_OUT = (datetime(year, 1, 1, tzinfo=UTC) for year in (2026, 2027))
"""Launch times, the seeds of tasks, are after these."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a seed is trained."""

    run: str
    seed: int = 0
    steps: int = 24
    groups: int = 4
    """Of GROUP attempts, in each step."""
    warm_up_steps: int = 900
    warmed_up: str = ""
    """A file with the weights after the warm-up, which is written if it is not there."""
    learning_rate: float = 3e-4
    epochs: int = 2
    """Updates for each step, on the same attempts."""
    layers: int = 2
    width: int = 80
    control: str = ""
    """`untrained` updates nothing; `shuffled` gives each attempt the reward of a random one of its group."""
    held_out: int = 4
    """Groups for each task, with other launch times, before and after."""


class Policy:
    """The model as a player. It writes calls, and reads replies."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], record: Record
    ) -> None:
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self._record = record
        self._generator = torch.Generator()
        self._pasts: dict[str, Past] = {}

    def refresh(self, seed: str) -> None:
        """Read the prompts with the weights of now."""
        self._generator.manual_seed(random.Random(seed).getrandbits(48))
        with torch.no_grad():
            self._pasts = {task: self.model(torch.tensor([ids]))[1] for task, ids in self.prompts.items()}

    async def play(self, episode: Episode) -> Conversation:
        """Sample calls, make them and add their replies, until the model claims or has no turn left."""
        started = time.monotonic()
        conversation = Conversation(self.model, self._pasts[episode.task], self._generator)
        for _ in range(MAX_TURNS):
            conversation.add([CALL])
            sampling = time.monotonic()
            text = self.tokenizer.decode(conversation.sample(MAX_TOKENS))
            calling = time.monotonic()
            reply = await episode.act(*split_call(text))
            self._record.seconds["sampling"] += calling - sampling
            self._record.seconds["calls"] += time.monotonic() - calling
            if episode.claimed:
                break
            conversation.add([REPLY, *self.tokenizer.encode(reply.text)[:MAX_REPLY_TOKENS]])
        else:
            await episode.truncate(turns=MAX_TURNS)
        conversation.seconds = time.monotonic() - started
        return conversation


async def train(
    d: Decathlon, options: Options, record: Record, shown: Callable[[str, int, int, str], None]
) -> None:
    """Warm a model up, and train it. `shown` gets what is done, how much of how much, and a figure."""
    started = time.monotonic()
    torch.manual_seed(options.seed)
    tasks = {task.id: task for task in await d.tasks()}
    texts = {name: prompt_text(task.prompt or "", await d.tools(task)) for name, task in tasks.items()}
    tokenizer = Tokenizer([*texts.values(), *transcript_texts(transcripts(random.Random("tokenizer")), 400)])
    prompts = {name: tokenizer.encode(text) for name, text in texts.items()}
    model = Model(len(tokenizer), options.width, options.layers)
    record.parameters = sum(parameter.numel() for parameter in model.parameters())
    record.prompt_tokens = {name: len(ids) for name, ids in prompts.items()}
    steps = options.warm_up_steps

    def warming(step: int, loss: float) -> None:
        shown("warm-up", step, steps, f"loss {loss:.3f}")

    if not (options.warmed_up and read_weights(model, options.warmed_up)):
        warm_up(model, tokenizer, prompts, options.seed, steps, warming)
        write_weights(model, options.warmed_up)
    record.seconds["warm-up"] = time.monotonic() - started
    policy = Policy(model, tokenizer, prompts, record)
    optimizer = torch.optim.AdamW(
        model.parameters(), options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    record.held_out["before"] = await held_out(d, policy, options, tasks, "before")
    training = time.monotonic()
    for step in range(options.steps):
        begun = time.monotonic()
        drawn = await draw(d, options, step, tasks)
        policy.refresh(f"{options.seed} {step}")
        groups = await play(d, policy, drawn, options.run, {"step": f"{step}"})
        updating = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / 5)
        if options.control != "untrained":
            update(model, optimizer, prompts, groups, options, random.Random(f"{options.seed} {step}"))
        record.seconds["updates"] += time.monotonic() - updating
        record.add_step(step, groups, time.monotonic() - begun)
        record.seconds["training"] = time.monotonic() - training
        shown("GRPO", step + 1, options.steps, f"reward {record.steps[-1]['reward']:.2f}")
    record.held_out["after"] = await held_out(d, policy, options, tasks, "after")
    record.seconds["all"] = time.monotonic() - started


async def draw(d: Decathlon, options: Options, step: int, tasks: dict[str, Task]) -> list[Task]:
    """The tasks of a step's groups, with their launch times: those that the run does not master yet."""
    seed = options.seed * 10_000 + step
    try:
        drawn = await d.sample(
            options.groups, seed=seed, max_pass_rate=MASTERED, pass_rate_run=options.run, pass_rate_last=LAST
        )
    except RequestError:  # nothing was played yet, or everything is mastered
        drawn = await d.sample(options.groups, seed=seed)
    minutes = seed * options.groups
    return [at(tasks[task.id], TRAINING, minutes + number) for number, task in enumerate(drawn)]


def at(task: Task, year: datetime, minutes: int) -> Task:
    """The task with this launch time."""
    return replace(task, launch_time=(year + timedelta(minutes=minutes)).isoformat())


async def play(
    d: Decathlon, policy: Policy, tasks: Sequence[Task], run: str, labels: dict[str, str]
) -> list[Group]:
    """Play a group of attempts at each task, all at once."""
    most = len(tasks) * GROUP
    async with d.batch(tasks, n=GROUP, concurrency=most, run=run, labels=labels, progress=False) as batch:
        return [group async for group in batch.run_groups(policy.play)]


async def held_out(
    d: Decathlon, policy: Policy, options: Options, tasks: dict[str, Task], when: str
) -> dict[str, Any]:
    """Mean reward and pass rate of each task at launch times that are not trained on."""
    policy.refresh(f"{options.seed} {when}")
    measured: dict[str, Any] = {}
    for task in tasks.values() if options.held_out else ():
        drawn = [at(task, HELD_OUT, minutes) for minutes in range(options.held_out)]
        groups = await play(d, policy, drawn, f"{options.run}-{when}", {})
        measured[task.id] = held_out_figures(groups)
    return measured


def update(
    model: Model,
    optimizer: torch.optim.Optimizer,
    prompts: dict[str, list[int]],
    groups: list[Group],
    options: Options,
    seed: random.Random,
) -> None:
    """Change the weights by the attempts that have a reward, each against its group."""
    rows: dict[str, list[tuple[Conversation, float]]] = defaultdict(list)
    for group in groups:
        graded = [
            (result.played, result.reward) for result in group if result.played and result.reward is not None
        ]
        rewards = [reward for _, reward in graded]
        if options.control == "shuffled":
            seed.shuffle(rewards)
        if len({*rewards}) > 1:  # else nobody is better
            means = torch.tensor(rewards)
            advantages = (means - means.mean()) / (means.std() + 1e-4)
            rows[group[0].task] += zip([played for played, _ in graded], advantages.tolist(), strict=True)
    count = sum(map(len, rows.values()))
    for _ in range(options.epochs if rows else 0):
        losses = [loss(model, prompts[task], attempts) for task, attempts in rows.items()]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def loss(model: Model, prompt: list[int], attempts: list[tuple[Conversation, float]]) -> Tensor:
    """The clipped losses of a task's attempts, summed. Each is a mean over its tokens, however many."""
    ids = padded([played.ids for played, _ in attempts])
    sampled = padded([played.sampled for played, _ in attempts])
    old = padded([played.log_probabilities for played, _ in attempts])
    advantages = torch.tensor([[advantage] for _, advantage in attempts])
    ratio = (model.log_probabilities(prompt, ids) - old[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(*CLIP) * advantages)
    return -((gain * sampled[:, 1:]).sum(1) / sampled.sum(1)).sum()
