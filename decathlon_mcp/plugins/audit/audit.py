"""`audit`: plays each task with policies that do not solve it, and says what they earned.

What every policy must not earn more than is what an empty attempt earns, which itself must be nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from decathlon_client import ClientError, Decathlon
from decathlon_client.client_values import Task as DescribedTask
from decathlon_client.process import shutdown_on_signal
from decathlon_client.script import Step

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, runnable_tasks
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.plugins.audit import policies
from decathlon_mcp.plugins.audit.abilities import Abilities, is_source
from decathlon_mcp.plugins.audit.answers import read_answers
from decathlon_mcp.plugins.audit.attacks import NOT_DONE, Attack, attacks
from decathlon_mcp.plugins.audit.audited_attempts import Attempt, Attempts, KeptResults, cost_of, read_stored
from decathlon_mcp.plugins.audit.policies import Target
from decathlon_mcp.plugins.audit.report import (
    DEFAULT_POLICIES,
    INTERRUPTED,
    OF_THE_SERVER,
    PAYS_ALREADY,
    Finding,
    Policy,
    Report,
    TaskReport,
)
from decathlon_mcp.plugins.audit.steadiness import find_unsteady
from decathlon_mcp.plugins.play import connect, redirect_logs, registry_of
from decathlon_mcp.plugins.regrade.regrading import Regrader
from decathlon_mcp.sandboxes.machine_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

MAX_OMISSIONS = 30
"""Steps of a solution that are left out one by one."""
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What is audited. `tasks`: their ids; none for all of the `split`. `search`: attempts of the search."""

    tasks: Sequence[str]
    split: str | None = None
    policies: tuple[Policy, ...] = DEFAULT_POLICIES
    jobs: int = 2
    search: int = 0
    run: str | None = None


async def audit(settings: Settings, options: AuditOptions, report: Report) -> int:
    """Audit tasks, and return 1 if one has a finding, else 0; 128 and the number after a signal.

    Raises DecathlonError.
    """
    raise_descriptor_limit()
    settings = settings.model_copy(update={"keep": "workspace"})
    tasks: list[_TaskAudit] = []
    async with shutdown_on_signal() as watcher:
        try:
            with redirect_logs(settings):
                async with connect(settings, None) as d:
                    await _begin(d, settings.state, options, report, tasks)
                    async with anyio.create_task_group() as group:
                        places = anyio.CapacityLimiter(options.jobs)
                        for each in tasks:
                            group.start_soon(each.finish_in, places)
                    await _attack(tasks, report)
        except ClientError as error:
            raise DecathlonError(error.message) from error
    report.tasks = [each.reported() for each in tasks if each.is_finished]
    status = report.finish()
    return status if watcher.status is None else watcher.status


def default_run(suites: Sequence[Suite]) -> str:
    """The name of an audit's run: another name as soon as a suite's files change."""
    digest = hashlib.sha256(json.dumps([(suite.name, suite.revision) for suite in suites]).encode())
    return f"audit-{digest.hexdigest()[:8]}"


def launch_time_of(catalogue: Catalogue, name: str, now: datetime) -> str:
    """The launch time of the attempts at a task: now, or that of the recording from which it is played.

    Raises UnknownTaskError and SuiteError.
    """
    suite, task = catalogue.find(name)
    try:
        return catalogue.launch_time(suite, task, now).isoformat()
    except BadRequestError:  # the recording has another one
        return catalogue.launch_time(suite, task).isoformat()


async def _begin(
    d: Decathlon, state: Path, options: AuditOptions, report: Report, tasks: list[_TaskAudit]
) -> None:
    """Fill `tasks`, and play the first attempts at each."""
    registry = registry_of(d)
    catalogue = registry.catalogue
    run = options.run or await anyio.to_thread.run_sync(default_run, catalogue.suites)
    stored, launch_times = await anyio.to_thread.run_sync(read_stored, state, run)
    names = [*dict.fromkeys(options.tasks)]
    if not names:
        names = runnable_tasks(catalogue, TaskFilter.model_validate({"split": options.split}))
    now = datetime.now(UTC).replace(microsecond=0)
    launch_times = {name: launch_time_of(catalogue, name, now) for name in names} | launch_times
    places = anyio.CapacityLimiter(options.jobs)
    attempts = Attempts(d, state, run, launch_times, stored, places, report.advance)
    report.begin(run, options.policies, len(names), len(stored))
    kept = await anyio.to_thread.run_sync(KeptResults.of_file, state / "audit" / f"{run}.json")
    shared = options, attempts, Regrader(registry), kept, report
    tasks += [_TaskAudit(TaskReport(task=name), *catalogue.find(name), *shared) for name in names]
    listed = {task.id: task for task in await d.tasks()}
    for each in tasks:
        # One at a time, so that what the machine did meanwhile is this task's.
        await each.begin(d, listed[each.found.task])
        report.done += 1


async def _attack(tasks: Sequence[_TaskAudit], report: Report) -> None:
    """Carry out the attacks that need an attempt of their own: each at all tasks before the next.

    So an audit that is interrupted has tried as much at each task.
    """
    async with anyio.create_task_group() as group:
        for attack in attacks():
            first: _TaskAudit | None = None
            for each in tasks:
                if attack not in each.alone:
                    continue
                if attack.server and first is not None and not each.task.in_place:
                    each.alone.remove(attack)
                    each.elsewhere.append((attack, first))
                    continue
                first = first or each
                report.steps += 1
                group.start_soon(each.forge_alone, attack)


@dataclass(slots=True)
class _TaskAudit:
    """The audit of one task."""

    found: TaskReport
    """What is found at it."""
    suite: Suite
    task: Task
    options: AuditOptions
    attempts: Attempts
    regrader: Regrader
    kept: KeptResults
    report: Report
    target: Target | None = None
    empty: Attempt | None = None
    looked: Attempt | None = None
    """The attempt of the calls that read."""
    abilities: Abilities = field(default_factory=Abilities)
    alone: list[Attack] = field(default_factory=list[Attack])
    """Attacks that are still to be carried out, each in an attempt of its own."""
    elsewhere: list[tuple[Attack, _TaskAudit]] = field(default_factory=list["tuple[Attack, _TaskAudit]"])
    """Attacks on the server, each with the task at which it is carried out."""
    is_finished: bool = False
    """Whether all was tried but the attacks in `alone`."""

    async def begin(self, d: Decathlon, listed: DescribedTask) -> None:
        """Play the empty attempt and the one that reads, whose costs are measured."""
        if not listed.runnable:
            self.found.unplayable = "; ".join(listed.missing) or "it cannot run here"
            return
        self.empty = await self._play("null", policies.null)
        if self.empty.verdict is None:
            self.found.unplayable = self.empty.failure
            return
        try:
            tools = tuple(await d.tools(listed))
            prompt = listed.prompt or ""
            answers = await anyio.to_thread.run_sync(read_answers, self.suite, self.task, prompt)
            self.target = Target(self.found.task, self.suite, self.task, prompt, tools, answers)
            # It says what the tools can do.
            self.looked = await self._play("reads", partial(policies.reads, self.target))
            replies = await self.attempts.replies(self.looked)
            self.abilities = policies.abilities_in(self.target, replies)
            await anyio.to_thread.run_sync(self._add_cost, self.empty, self.looked, len(replies))
        except (ClientError, DecathlonError) as error:
            self.found.unplayable = error.message

    def _add_cost(self, empty: Attempt, looked: Attempt, calls: int) -> None:
        """Add what the first attempts took, as far as they were played now or in an earlier audit. Blocks."""
        name = self.found.task
        self.found.cost = cost_of(empty, looked, calls, self.kept.costs.get(name))
        if self.found.cost is not None:
            self.kept.costs[name] = self.found.cost
            self.kept.write()

    async def finish_in(self, places: anyio.CapacityLimiter) -> None:
        async with places:
            try:
                await self._finish()
            except DecathlonError as error:
                self.found.unplayable = error.message
        self.is_finished = True
        self.report.finished += 1
        self.report.done += 1

    def reported(self) -> TaskReport:
        self.found.skipped |= {f"forger {attack.name}": INTERRUPTED for attack in self.alone}
        for attack, other in self.elsewhere:
            why = INTERRUPTED if attack in other.alone else f"{OF_THE_SERVER} {other.found.task}"
            self.found.skipped[f"forger {attack.name}"] = why
        return self.found

    async def _finish(self) -> None:
        if self.target is None or self.empty is None or self.looked is None:
            return
        if self.empty.reward > 0:
            self._add_finding("pays for nothing", f"an empty attempt earns {self.empty.reward:g}", self.empty)
        chosen, abilities = self.options.policies, self.abilities
        best = self.empty
        if "idle" in chosen:
            await self._reads(self.target, self.looked)
        if "random" in chosen and self.target.usable:
            attempt = await self._play("random", partial(policies.played, policies.random_steps(self.target)))
            self._must_not_earn("random calls", attempt)
        if "vandal" in chosen:
            await self._vandal(self.target, abilities)
        if "forgers" in chosen:
            await self._forgers(self.target, abilities)
        if "leaks" in chosen:
            await self._leaks(self.target)
        if "oracle" in chosen:
            best = await self._oracle(self.target, abilities) or best
        if "steadiness" in chosen:
            await self._steadiness(best)
        if "search" in chosen or self.options.search:
            await self._search(self.target)

    async def _play(self, policy: str, play: policies.Play) -> Attempt:
        attempt = await self.attempts.play(self.found.task, policy, play)
        self.found.rewards[policy] = None if attempt.verdict is None else attempt.reward
        return attempt

    def _add_finding(self, kind: str, what: str, attempt: Attempt | None) -> None:
        self.found.findings.append(Finding(kind, what, "" if attempt is None else attempt.public_id))

    def _must_not_earn(self, what: str, attempt: Attempt, kind: str = "pays for nothing") -> None:
        """Note a finding for an attempt that earned something or has no verdict."""
        if attempt.reward > self._empty_reward + TOLERANCE:
            self._add_finding(kind, f"{what} earn {attempt.reward:g}", attempt)
        elif attempt.verdict is None and attempt.episode:
            self._add_finding("no reward instead of 0", f"{what}: {attempt.failure}", attempt)
        elif attempt.verdict is None:
            self.found.skipped[what] = attempt.failure

    async def _reads(self, target: Target, attempt: Attempt) -> None:
        """If looking has earned something, find out whether the file did that it wrote."""
        if attempt.verdict is not None and attempt.reward > self._empty_reward + TOLERANCE:
            alone = await self._play("idle", partial(policies.idle, target))
            if alone.verdict is not None and alone.reward <= self._empty_reward + TOLERANCE:
                self._must_not_earn("calls that read, and a file that no evaluator asks for,", attempt)
                return
            attempt = alone
        self._must_not_earn("idle calls", attempt)

    @property
    def _empty_reward(self) -> float:
        return 0.0 if self.empty is None else self.empty.reward

    async def _vandal(self, target: Target, abilities: Abilities) -> None:
        if not policies.can_destroy(target, abilities):
            self.found.skipped["vandal"] = "no tool deletes or writes files"
            return
        attempt = await self._play("vandal", partial(policies.vandal, target, abilities))
        self._must_not_earn("deleted and emptied files", attempt)

    async def _forgers(self, target: Target, abilities: Abilities) -> None:
        names = (*target.answers.outputs, *target.answers.workspace)
        assert self.empty is not None
        if self.empty.verdict is not None and self.empty.verdict.success:
            self.found.skipped |= {f"forger {attack.name}": PAYS_ALREADY for attack in attacks()}
            return
        raw: Mapping[str, Any] = self.empty.verdict.raw if self.empty.verdict else {}
        if raw.get("isolation") == "none" and abilities.runner is not None:
            # They would change the machine of the person who audits.
            abilities = replace(abilities, runner=None)
            self.found.notes.append("no attack ran a command, because the sandboxes are not isolated")
        unlimited = tuple(map(str, raw.get("unlimited") or ()))
        obstacles = {attack.name: attack.obstacle(abilities, names, unlimited) for attack in attacks()}
        self.found.skipped |= {f"forger {name}": why for name, why in obstacles.items() if why}
        possible = [attack for attack in attacks() if not obstacles[attack.name]]
        self.abilities = abilities
        await self._forge(target, abilities, [one for one in possible if not one.excludes(abilities)])
        self.alone = [one for one in possible if one.excludes(abilities)]

    async def forge_alone(self, attack: Attack) -> None:
        assert self.target is not None
        try:
            await self._forge(self.target, self.abilities, [attack])
        except DecathlonError as error:
            self.found.skipped[f"forger {attack.name}"] = error.message
        self.alone.remove(attack)
        self.report.done += 1

    async def _forge(self, target: Target, abilities: Abilities, together: Sequence[Attack]) -> None:
        """Carry out attacks in one attempt; if it earns, in two of half of them."""
        if not together:
            return
        names = [attack.name for attack in together]
        policy = f"forger {names[0]}" if len(names) == 1 else f"forgers {names[0]} to {names[-1]}"
        attempt = await self._play(policy, partial(policies.forger, target, abilities, together))
        for _, _, _, text in await self.attempts.replies(attempt):
            for line in text.splitlines():
                if line.startswith(NOT_DONE):
                    name = f"forger {line.rpartition(' ')[2]}"
                    self.found.skipped[name] = "its program failed in the sandbox"
        earned = attempt.verdict is None or attempt.reward > self._empty_reward + TOLERANCE
        if earned and len(together) > 1:
            middle = len(together) // 2
            await self._forge(target, abilities, together[:middle])
            await self._forge(target, abilities, together[middle:])
        else:
            what = f'attacks like "{together[0].row}" ({", ".join(names)})'
            self._must_not_earn(what, attempt, "can be forged")

    async def _leaks(self, target: Target) -> None:
        """Look for answers in the replies of attempts that only looked."""
        if not target.answers.parts:
            why = "its checkout has no answer of 32 characters that is not in the prompt"
            self.found.skipped["leaks"] = why
        stored = (self.attempts.stored.get((self.found.task, policy)) for policy in ("reads", "random"))
        looked = [attempt for attempt in stored if attempt is not None]
        sources = {tool.name for tool in target.tools if is_source(tool, target.prompt)}
        shown = ""
        for attempt in looked:
            for tool, arguments, _, text in await self.attempts.replies(attempt):
                request = json.dumps(arguments, ensure_ascii=False)
                if policies.FOUND in text:
                    paths = [line for line in text.splitlines() if line.startswith("/")]
                    if paths:
                        self._add_finding("leaks", f"the sandbox has {paths[0]}", attempt)
                        return
                elif (where := target.answers.seen_in(text, request)) is None:
                    continue
                elif tool in sources:
                    shown = shown or f"a reply of {tool} has {where}, and the prompt names its server"
                else:
                    self._add_finding("leaks", f"a reply of {tool} has {where}", attempt)
                    return
        if shown:
            self.found.notes.append(f"{shown}: is that the task?")

    async def _oracle(self, target: Target, abilities: Abilities) -> Attempt | None:
        """Play a solution, and without each of its steps; the attempt that came closest."""
        steps = await anyio.to_thread.run_sync(policies.find_oracle, target)
        if steps is None:
            if not await anyio.to_thread.run_sync(policies.can_lay_truth, target, abilities):
                self.found.skipped["oracle"] = (
                    f"there is no oracles/{self.task.id}.jsonl, and its tools cannot lay its ground truth"
                )
                return None
            attempt = await self._play("oracle", partial(policies.lay_truth, target, abilities))
            if attempt.verdict is None or not attempt.verdict.success:
                self.found.skipped["oracle"] = (
                    f"its ground truth, laid into the workspace, earns {attempt.reward:g}"
                )
            return attempt if attempt.verdict else None
        attempt = await self._play("oracle", partial(policies.played, steps))
        if attempt.verdict is None or not attempt.verdict.success:
            result = attempt.failure or f"earns {attempt.reward:g}"
            self._add_finding("cannot be solved", f"its solution {result}", attempt)
            return None
        await self._omissions(target, steps, attempt)
        return attempt

    async def _omissions(self, target: Target, steps: Sequence[Step], whole: Attempt) -> None:
        """At least one step that changes something must be needed."""
        left_out = policies.omissions(target, steps)
        if len(left_out) > MAX_OMISSIONS:
            self.found.notes.append(
                f"of {len(left_out)} steps that change something, {MAX_OMISSIONS} were left out"
            )
        free: list[str] = []
        for name, rest in left_out[:MAX_OMISSIONS]:
            attempt = await self._play(f"without {name}", partial(policies.played, rest))
            if attempt.verdict is not None and attempt.reward >= whole.reward - TOLERANCE:
                free.append(name)
        if left_out and len(free) == len(left_out[:MAX_OMISSIONS]):
            self._add_finding("pays for nothing", "no step of its solution is needed for its reward", whole)
        elif free:
            self.found.notes.append(f"of its solution these cost nothing: {'; '.join(free)}")

    async def _steadiness(self, attempt: Attempt) -> None:
        known, episode = self.kept.graded_again, attempt.episode
        if episode not in known:
            try:
                known[episode] = await find_unsteady(
                    self.regrader, self.attempts.state / "episodes" / episode
                )
            except DecathlonError as error:
                self.found.skipped["steadiness"] = error.message
                return
            self.kept.write()  # not in a thread, in which tasks would write the file at once
        unsteady = known[episode]
        if unsteady is not None:
            what = f"the same attempt, graded again{unsteady.how}, earns {unsteady.after} instead of"
            reason = f" ({unsteady.last_line})" if unsteady.last_line else ""
            self._add_finding("unsteady", f"{what} {unsteady.before}{reason}", attempt)

    async def _search(self, target: Target) -> None:
        """Climb from random calls to neighbours that earn more, as far as the attempts go."""
        assert self.empty is not None
        if await anyio.to_thread.run_sync(load_rubric, self.suite, self.task) is None:
            self.found.skipped["search"] = "its reward is not dense"
            return
        steps, best = list[Step](), self.empty
        for number in range(self.options.search):
            neighbour = policies.changed_steps(target, steps, f"search-{number}")
            attempt = await self._play(f"search-{number}", partial(policies.played, neighbour))
            if attempt.verdict is not None and attempt.reward >= best.reward:
                steps, best = neighbour, attempt
        if best.verdict is not None and best.verdict.success:
            self._add_finding(
                "pays for nothing", f"a search of {self.options.search} attempts solved it", best
            )
        elif best.reward > self.empty.reward + TOLERANCE:
            self.found.notes.append(f"a search of {self.options.search} attempts earned {best.reward:g}")
