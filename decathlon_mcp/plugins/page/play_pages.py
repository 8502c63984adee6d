"""`/play`: pick a task, call its tools, claim it, see the verdict. It works without JavaScript.

What was called and replied is read from the trajectory, as on the pages that show episodes. An attempt
belongs to the token that started it, and has the label `run=by-hand`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import anyio
import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from decathlon_mcp.catalogue.catalogue import list_tasks
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.call import Call, Waiter
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import AtCapacityError, DecathlonError, SuiteError
from decathlon_mcp.plugins.history.values import EpisodeDetails
from decathlon_mcp.plugins.page import episode_pages
from decathlon_mcp.plugins.page.call_entries import shown
from decathlon_mcp.plugins.page.control import BY_HAND
from decathlon_mcp.plugins.page.forms import (
    READ_SECONDS,
    FormReader,
    Reading,
    SavedForm,
    SavedForms,
    TooSlowError,
    check_size,
    fill_form,
    inputs_of,
    is_encodable,
    read_form,
    read_text,
    show_form,
    text_of,
)
from decathlon_mcp.plugins.page.schema import JSON_ONLY, Field, Kind, make_form
from decathlon_mcp.plugins.page.site import Site, Sorting, Visit
from decathlon_mcp.storage.trajectory import RequestKeys
from decathlon_mcp.types import JsonObject, as_object

REPLY_SECONDS = 1.0
"""How long a step waits for the reply, so that most need no further look."""
MAX_RUNNING_BYTES = 8 << 20
"""With longer arguments of calls that run, an attempt gets no further call: they are in memory, and what was
sent by forms counts nowhere else."""
SHOWN_CALLS = 50
MAX_FORMS = 256
"""Forms that are kept, of tools that differ."""
MAX_DESCRIPTION_CHARACTERS = 4_000
TASK_COLUMNS = ("task", "suite", "split", "-here")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of the visitor's own. `episode`: None once it has ended."""

    details: EpisodeDetails
    episode: Episode | None
    can_evaluate: bool

    @property
    def public_id(self) -> str:
        return self.details.summary.public_id

    @property
    def path(self) -> str:
        return f"/play/{self.public_id}"


class PlayPages:
    """The pages for playing by hand. `registry`: of the server that plays the episodes."""

    def __init__(self, site: Site, registry: EpisodeRegistry) -> None:
        self._site = site
        self._registry = registry
        self._reader = FormReader()
        self._forms: OrderedDict[str, Field] = OrderedDict()
        self._saved = SavedForms()

    def routes(self) -> list[BaseRoute]:
        """The routes of these pages."""
        endpoint = self._site.endpoint
        calls, reply = (partial(self._own, view=view) for view in (episode_pages.calls, episode_pages.reply))
        return [
            Route("/play", endpoint(self._tasks)),
            Route("/play/start", endpoint(self._start), methods=["POST"]),
            Route("/play/{id}", endpoint(self._attempt)),
            Route("/play/{id}/form", endpoint(self._form), methods=["POST"]),
            Route("/play/{id}/cancel", endpoint(self._cancel), methods=["POST"]),
            Route("/play/{id}/claim", endpoint(self._claim), methods=["POST"]),
            Route("/play/{id}/end", endpoint(self._end), methods=["POST"]),
            Route("/play/{id}/alive", endpoint(self._alive), methods=["POST"]),
            Route("/play/{id}/calls", endpoint(calls)),
            Route("/play/{id}/reply/{seq:int}", endpoint(reply)),
        ]

    async def _tasks(self, visit: Visit) -> Response:
        """`/play`: the tasks, or one with its prompt."""
        catalogue = self._registry.catalogue
        wanted, text = visit.query("task"), visit.query("q").strip().lower()[:200]
        live = [
            episode
            for episode in self._registry.live
            if episode.spec.labels.get("run") == BY_HAND
            and episode.spec.owner.token == visit.viewer.principal.token
        ]

        def render() -> Response:
            tasks = list_tasks(catalogue, [name for name, _, _ in catalogue])
            found = [task for task in tasks if text in json.dumps(task, ensure_ascii=False).lower()]
            sorting = Sorting.of(visit, "/play", TASK_COLUMNS, "fit", parameters={"q": text})
            keys: dict[str, Callable[[JsonObject], Any]] = {
                "fit": lambda task: _rank(text, task["id"]),
                "task": lambda task: task["id"],
                "suite": lambda task: task["suite"],
                "split": lambda task: task["splits"],
                "here": lambda task: task["runnable"],
            }
            found = sorting.sorted(found, keys)
            chosen = prompt = None
            if wanted:
                suite, task = catalogue.find(wanted)
                (chosen,) = list_tasks(catalogue, [wanted])
                with suppress(SuiteError):  # `missing` says why
                    prompt = catalogue.prompt(suite, task, datetime.now().astimezone())
            return visit.render(
                "play_tasks.html",
                tasks=found,
                sorting=sorting,
                chosen=chosen,
                prompt=prompt,
                search=text,
                attempts=live,
                nonce=secrets.token_urlsafe(16),
            )

        return await self._site.in_thread(render)

    async def _start(self, visit: Visit) -> Response:
        """Start an attempt; the same form again leads to the same attempt."""
        episode = self._registry.start(
            visit.form.get("task", ""),
            visit.viewer.principal,
            operation=_operation(visit.form.get("nonce", "")),
            labels={"run": BY_HAND},
        )
        with episode.lease.hold(), anyio.move_on_after(REPLY_SECONDS):
            await episode.set_up()
        return visit.redirect(f"/play/{episode.public_id}")

    async def _find(self, visit: Visit) -> Attempt:
        """The attempt in the address. 404 unless it is the visitor's own, and one by hand."""
        public_id = visit.path["id"]
        details = await anyio.to_thread.run_sync(visit.history.episode, public_id)
        principal = visit.viewer.principal
        if (
            details is None
            or details.summary.owner != principal.token
            or details.summary.labels.get("run") != BY_HAND
        ):
            raise HTTPException(404, "There is no such attempt of yours.")
        episode = next((each for each in self._registry.live if each.public_id == public_id), None)
        policy = (details.head or {}).get("policy", "controller") if episode is None else episode.spec.policy
        return Attempt(details, episode, principal.may_evaluate(policy))

    async def _live(self, visit: Visit) -> tuple[Attempt, Episode]:
        attempt = await self._find(visit)
        if attempt.episode is None:
            raise HTTPException(409, "This attempt is over.")
        return attempt, attempt.episode

    async def _attempt(self, visit: Visit) -> Response:
        """`/play/{id}`: the attempt as it is now."""
        attempt = await self._find(visit)
        episode = attempt.episode
        values: dict[str, Any] = {"running": (), "tools": (), "tool": None, "form": None, "prompt": None}
        phase = "over" if episode is None else str(episode.state.phase)
        if episode is not None:
            with episode.lease.hold():
                await _attend(episode, REPLY_SECONDS / 2)
                phase = str(episode.state.phase)
                values["running"] = {call.seq for call in episode.calls.unanswered}
                if episode.state.phase is Phase.READY:
                    values |= await self._tool_values(visit, attempt, episode)
                values["prompt"] = await anyio.to_thread.run_sync(lambda: episode.prompt.task)
        is_waiting = phase in ("queued", "opening", "claimed", "scored") or bool(values["running"])
        return await self._site.in_thread(partial(self._render, visit, attempt, phase, is_waiting, values))

    def _render(
        self, visit: Visit, attempt: Attempt, phase: str, is_waiting: bool, values: Mapping[str, Any]
    ) -> Response:
        details = visit.history.episode(attempt.public_id) or attempt.details
        last = details.calls
        end = min(visit.number("last", last), last)
        first = max(1, end - SHOWN_CALLS + 1)
        entries = visit.history.calls(attempt.public_id, first, end) if end else []
        may_see = attempt.can_evaluate and details.verdict is not None
        return visit.render(
            "play_attempt.html",
            attempt=attempt,
            episode=details.summary,
            details=details,
            phase=phase,
            is_waiting=is_waiting and visit.query("still") != "1",
            waits_for=None if attempt.episode is None else attempt.episode.waits_for,
            entries=list(reversed(shown(entries))),
            earlier=first - 1,
            wanted=visit.number("call", 0) if visit.query("call") else 0,
            verdict=details.verdict if may_see else None,
            metrics=episode_pages.metrics_of(details) if may_see else [],
            nonce=secrets.token_urlsafe(16),
            **values,
        )

    async def _tool_values(self, visit: Visit, attempt: Attempt, episode: Episode) -> dict[str, Any]:
        """The tools, and the form of the chosen tool."""
        tools = _tools(episode)
        text = visit.query("find").strip().lower()[:200]
        values: dict[str, Any] = {
            "tools": sorted(
                (name for name, tool in tools.items() if text in f"{name} {tool.get('description')}".lower()),
                key=partial(_rank, text),
            ),
            "find": text,
        }
        tool = tools.get(visit.query("tool"))
        if tool is None:
            return values
        form = await self._form_of(tool)
        saved = self._saved.get(attempt.public_id, tool["name"])
        as_text = saved.text is not None or form.kind is Kind.JSON
        return values | {
            "tool": tool["name"],
            "description": str(tool.get("description") or "")[:MAX_DESCRIPTION_CHARACTERS],
            "form": None if as_text else show_form(form, saved.inputs, saved.messages),
            "text": saved.text or "{}",
            "json_only": form.kind is Kind.JSON,
            "problem": saved.problem or (next(iter(saved.messages.values()), "") if as_text else ""),
            "errors": len(saved.messages),
        }

    async def _form_of(self, tool: JsonObject) -> Field:
        schema = _schema(tool)
        digest = _digest(schema)
        form = self._forms.get(digest)
        if form is None:
            try:
                form = await self._reader.run(make_form, schema)
            except (TooSlowError, ValueError, RecursionError):
                form = JSON_ONLY
            self._forms[digest] = form
            while len(self._forms) > MAX_FORMS:
                self._forms.popitem(last=False)
        return form

    async def _form(self, visit: Visit) -> Response:
        """A form of a tool was sent: to call the tool, or to change the form."""
        attempt, episode = await self._live(visit)
        inputs = visit.form
        name, action = inputs.get("tool", ""), inputs.get("do", "call")
        with episode.lease.hold():
            if episode.state.phase is not Phase.READY or (tool := _tools(episode).get(name)) is None:
                return visit.redirect(attempt.path)
            save = partial(self._saved.save, attempt.public_id, name, sent=inputs)
            back = f"{attempt.path}?tool={quote(name, safe='')}"
            form = await self._form_of(tool)
            text = inputs.get("json")
            saved = SavedForm(text=text)
            if text is None:
                saved = SavedForm(inputs_of(inputs, action))
                check_size(form, saved.inputs)
            try:
                if action == "json" and text is None:
                    saved = SavedForm(text=await self._reader.run(text_of, form, saved.inputs))
                elif action == "form" and text is not None and form.kind is not Kind.JSON:
                    filled = await self._reader.run(fill_form, form, text)
                    is_problem = isinstance(filled, str)
                    saved = SavedForm(text=text, problem=filled) if is_problem else SavedForm(filled)
                elif action == "call":
                    reading: Reading = await (
                        self._reader.run(read_text, text)
                        if text is not None
                        else self._reader.run(read_form, form, saved.inputs)
                    )
                    saved = replace(saved, messages=reading.messages)
                    if reading.arguments is not None:
                        call = await self._call(episode, name, reading.arguments, inputs.get("nonce", ""))
                        back += f"&call={call}"
            except TooSlowError:
                saved = replace(
                    saved, problem=f"This form could not be read in {READ_SECONDS:g} s: use JSON."
                )
            except DecathlonError as error:
                saved = replace(saved, problem=error.message)
            save(saved)
        return visit.redirect(f"{back}#work")

    async def _call(self, episode: Episode, name: str, arguments: str, nonce: str) -> int:
        """Call a tool; returns the call's number. The same form with the same arguments calls once."""
        # Another number in a form that one has gone back to is another call.
        waiter = Waiter(RequestKeys(_operation(nonce, name, arguments)), detached=True)
        # Both are between tokens; browsers send both. A call is a line of its trajectory.
        text = arguments.replace("\r", " ").replace("\n", " ").encode()
        running_bytes = sum(len(each.params.arguments or b"") for each in episode.calls.unanswered)
        if running_bytes > MAX_RUNNING_BYTES:
            raise AtCapacityError("calls with long arguments run: wait for their replies, or cancel them")
        call = await episode.calls.accept(name, CallParams(text), waiter)
        with anyio.move_on_after(REPLY_SECONDS):
            await call.wait(waiter)
        return call.seq

    async def _cancel(self, visit: Visit) -> Response:
        """Cancel a call that runs."""
        attempt, episode = await self._live(visit)
        with episode.lease.hold():
            for call in episode.calls.unanswered:
                if str(call.seq) == visit.form.get("call"):
                    call.abandon()
                    await _attend(episode, REPLY_SECONDS, call)
        tool = quote(visit.form.get("tool", ""), safe="")
        return visit.redirect(f"{attempt.path}?tool={tool}#work")

    async def _claim(self, visit: Visit) -> Response:
        """Claim that the task is done; the attempt is graded and ends."""
        attempt, episode = await self._live(visit)
        answer = visit.form.get("answer", "").replace("\r\n", "\n")
        with episode.lease.hold():
            await episode.claim_done(answer or None, operation=_operation(visit.form.get("nonce", "")))
            episode.close()
            with anyio.move_on_after(REPLY_SECONDS):
                await episode.state.reach(Phase.ENDED)
        return visit.redirect(attempt.path)

    async def _end(self, visit: Visit) -> Response:
        """End the attempt without a claim, once that was confirmed."""
        attempt, episode = await self._live(visit)
        if visit.form.get("sure") != "yes":
            return await self._site.in_thread(
                lambda: visit.render(
                    "sure.html",
                    question="End this attempt?",
                    consequence="Its sandbox is removed. Without a claim it is not graded.",
                    answer="End it",
                    action=f"{attempt.path}/end",
                    fields={},
                    back=attempt.path,
                )
            )
        episode.close()
        with anyio.move_on_after(REPLY_SECONDS):
            await episode.state.reach(Phase.ENDED)
        return visit.redirect(attempt.path)

    async def _alive(self, visit: Visit) -> Response:
        """Renew the lease for an open page, and answer with the attempt's state."""
        attempt = await self._find(visit)
        episode = attempt.episode
        if episode is None:
            return Response("over", media_type="text/plain")
        with episode.lease.hold():
            await _attend(episode, REPLY_SECONDS)
            running = ",".join(str(call.seq) for call in episode.calls.unanswered)
            return Response(f"{episode.state.phase} {running}", media_type="text/plain")

    async def _own(self, visit: Visit, view: Callable[[Visit], Response]) -> Response:
        """A view of an episode, for the attempt's own player."""
        await self._find(visit)
        return await self._site.in_thread(view, replace(visit, is_own=True))


async def _attend(episode: Episode, seconds: float, *calls: Call) -> None:
    """Wait for calls that run, all if none are named. Calls that nobody waits for are cancelled at last."""

    async def wait(call: Call) -> None:
        with suppress(DecathlonError):
            call.add(waiter := Waiter(detached=True))
            await call.wait(waiter)

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for call in calls or episode.calls.unanswered:
                tasks.start_soon(wait, call)


def _tools(episode: Episode) -> dict[str, JsonObject]:
    """The task's tools by name. To claim and to grade have buttons of their own."""
    offered = episode.tools.offered
    if offered is None:
        return {}
    named = {tool["name"]: tool for tool in offered.tools if tool["name"] != offered.claim_name}
    # No address can have another name.
    return {name: tool for name, tool in named.items() if is_encodable(name)}


def _schema(tool: JsonObject) -> str:
    return json.dumps(as_object(tool.get("inputSchema")) or {})


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _operation(nonce: str, *content: str) -> str:
    """The operation of a form that was sent. The form itself does not have it."""
    text = json.dumps([nonce or secrets.token_urlsafe(16), *content])
    return f"page-{sha256(text.encode()).hexdigest()[:32]}"


def _rank(text: str, name: str) -> int:
    """The place of a name among found names: by how well the name itself fits."""
    name = name.lower()
    words = re.split(r"[^a-z0-9]+", name)
    if text in (name, *words):
        return 0
    return 1 if any(word.startswith(text) for word in words) else 2 if text in name else 3
