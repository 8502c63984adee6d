"""Plays an episode with a program or a model.

A program gets an address that only plays, and its output becomes notes. A model, behind an endpoint like
OpenAI's, gets the task's prompt and tools; its calls are made one after the other and their replies sent
back, until it claims, answers without a call, or has taken all its turns.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import httpx2
from decathlon_client import Episode
from decathlon_client.client_values import as_object, as_objects
from decathlon_client.notes import NoteSender, sending_notes, text_of

from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.output import without_controls
from decathlon_mcp.cli.usage import without_credentials
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.agents.agent_programs import Program, configure
from decathlon_mcp.plugins.agents.launch import Launcher
from decathlon_mcp.plugins.agents.reach import Reached, relay_connections
from decathlon_mcp.plugins.agents.serving import EmbeddedServer, PlayingApp, playing
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import quoted

NOTE_SECONDS = 1.0
"""Time between two notes: a line each would be thousands."""
MAX_NOTES_BYTES = 8 << 20
"""How much of a program's output becomes notes. A log of an episode has 256 MiB for all of it."""
_LAST_CHARACTERS = 500

AGENT_LABEL, ISOLATION_LABEL, VERSION_LABEL = "agent", "agent_isolation", "agent_version"
MODEL_LABEL = "model"
"""Labels of each episode: the program's name or `model`, what kept a program from the state folder, its
version, and the model's name."""
STATUS_LABEL, RUNNING, KILLED = "program_status", "running", "killed"
"""Label of an episode: the exit status of its program, as a shell has it, or one of these. It stays `RUNNING`
if the attempt was over before the program."""


class ProgramFailedError(Exception):
    """A program was not started, or could not reach its model before it made a call: there is no attempt."""


@dataclass(slots=True, kw_only=True)
class AgentPlayer:
    """Plays an attempt of a batch, see `Decathlon.batch`; returns the exit status, None if it was killed."""

    program: Program
    launcher: Launcher
    variables: Mapping[str, str]
    """See `choose_variables`."""
    version: str | None
    """See `check_version`."""
    seconds: float
    """Time limit of an attempt."""
    server: EmbeddedServer | None = None
    """Must be set before an attempt."""
    shows_output: bool = False
    """Whether the program's output is also written to stderr, without control characters."""
    last_output: str = ""
    """The end of what the program wrote in the latest attempt that ended."""

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its episodes."""
        return {
            AGENT_LABEL: self.program.name,
            ISOLATION_LABEL: self.launcher.isolation,
            STATUS_LABEL: RUNNING,
            **({} if self.version is None else {VERSION_LABEL: self.version}),
        }

    async def __call__(self, episode: Episode) -> int | None:
        """Run the program until it ends, or its time is over. Raises ProgramFailedError, DecathlonError."""
        assert self.server is not None
        status, reached = None, Reached()
        async with sending_notes(episode, counts_calls=False) as notes:
            output = _Output(notes)
            with anyio.move_on_after(self.seconds) as limit:
                status = await self._run(self.server, episode, output, reached)
        self.last_output = output.last or "(nothing)"
        if status is None and not limit.cancelled_caught:
            raise ProgramFailedError(f"{self.program.name} was not started: {self.last_output}")
        served = self.server.registry.find(episode.id, Principal())
        if reached.why_not and not served.calls.sent and served.claim is None:
            raise ProgramFailedError(
                f"{self.program.name} made no call, and its model could not be reached ({reached.why_not}); "
                f"its output ends with: {self.last_output}"
            )
        # An attempt that was claimed, or met a limit, is graded since; its verdict has the labels of then.
        if served.claim is None and served.state.phase is not Phase.ENDED:
            labels = {**served.spec.labels, STATUS_LABEL: KILLED if status is None else str(status)}
            served.spec = replace(served.spec, labels=labels)
            served.records.write(labels=labels)
            if status is None:
                await episode.truncate()
        return status

    async def _run(
        self, server: EmbeddedServer, episode: Episode, output: _Output, reached: Reached
    ) -> int | None:
        """Run the program; its exit status, None if it was never started. `reached`: is kept up to date."""
        assert episode.agent_address is not None
        async with AsyncExitStack() as stack:
            location = stack.enter_context(self.launcher.location())
            configuration = configure(
                self.program.command,
                location.root,
                address=location.address,
                prompt=episode.prompt,
                tool_seconds=self.seconds,
                variables=self.variables,
            )
            running = await stack.enter_async_context(self.launcher.start(location, configuration))
            listener, *relayed = (*([location.listener] if location.listener else ()), *running.listeners)
            app = PlayingApp(server.app, episode.agent_address, location.path)
            await stack.enter_async_context(playing(app, listener, server.limits))
            tasks = await stack.enter_async_context(background_tasks())
            for socket, endpoint in zip(relayed, self.launcher.endpoints, strict=True):
                tasks.start_soon(relay_connections, socket, endpoint, reached)
            # A character that is cut waits for its rest.
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            tasks.start_soon(output.run)
            try:
                async for chunk in running.output:
                    text = decoder.decode(chunk)
                    output.add(text)
                    if self.shows_output:
                        sys.stderr.write(without_controls(text))
                        sys.stderr.flush()
                return await running.wait()
            finally:
                output.end_note()


class _Output:
    """What a program writes, as notes of its episode."""

    def __init__(self, notes: NoteSender) -> None:
        self._notes = notes
        self._waiting = ""
        self._remaining_bytes = MAX_NOTES_BYTES
        self.last = ""
        """The end of what was written."""

    def add(self, text: str) -> None:
        """Add to the next note. What is too much is dropped; the last note says so."""
        self.last = (self.last + text)[-_LAST_CHARACTERS:]
        if self._remaining_bytes <= 0:
            return
        self._remaining_bytes -= len(text.encode())
        self._waiting += text
        if self._remaining_bytes <= 0:
            self._waiting += f"\n[further output is not kept: a program has {MAX_NOTES_BYTES >> 20} MiB]\n"

    async def run(self) -> None:
        """Make notes until cancelled."""
        while True:
            await anyio.sleep(NOTE_SECONDS)
            self.end_note()

    def end_note(self) -> None:
        """Make a note of what has come since the last one."""
        text, self._waiting = self._waiting, ""
        if text.strip():
            self._notes.add(text)


KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
"""Variables that OpenAI's SDKs read too."""
DEFAULT_URL = "https://api.openai.com/v1"
ANSWER_SECONDS, CONNECT_SECONDS = 600.0, 20.0
"""How long a model may take for an answer, as in the SDKs of its makers, and to be connected to."""
MAX_ANSWER_BYTES = 8 << 20
TRIES = 5
"""How often a request is sent that failed for a reason that may pass."""
MAX_DELAY_SECONDS = 60.0
"""Longest wait before a request is sent again; quotas of models are by the minute."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed."""
TOO_LONG = frozenset({400, 413, 422})
"""With these an endpoint refuses a conversation that is too long. A wrong request has the same status, but is
refused at the first turn."""
_MESSAGE_CHARACTERS = 300


class ModelFailedError(Exception):
    """The model's endpoint failed: there is no attempt."""


class RequestRefusedError(ModelFailedError):
    """The endpoint refused a request with a status of TOO_LONG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlayer:
    """Plays an attempt of a batch, see `Decathlon.batch`; returns how many turns the model took."""

    model: str
    turns: int
    """How many answers the model may give. After the last one the attempt is truncated."""
    endpoint: Endpoint

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its episodes."""
        return {AGENT_LABEL: "model", MODEL_LABEL: self.model}

    async def __call__(self, episode: Episode) -> int:
        """Play until the end of the attempt. Raises ModelFailedError, ClientError."""
        async with sending_notes(episode) as notes:
            return await self._play(episode, notes)

    async def _play(self, episode: Episode, notes: NoteSender) -> int:
        messages: list[JsonObject] = [{"role": "user", "content": episode.prompt}]
        tools = [tool.function for tool in episode.tools]
        for turn in range(self.turns):
            request = {"model": self.model, "messages": messages, "tools": tools}
            try:
                completion = await self.endpoint.complete(request)
            except RequestRefusedError:
                if turn == 0:
                    raise
                # The model filled its own context: that must not free it from its reward.
                await episode.truncate(turns=turn)
                return turn
            message = _message_of(completion)
            messages.append(message)
            notes.add(text_of(message.get("content")), usage=_usage_of(completion))
            calls = as_objects(message.get("tool_calls"))
            for call in calls:
                function = as_object(call.get("function")) or {}
                reply = await episode.act(str(function.get("name", "")), function.get("arguments"))
                messages.append(
                    {"role": "tool", "tool_call_id": str(call.get("id", "")), "content": reply.text}
                )
            if episode.claimed or not calls:
                return turn + 1
        await episode.truncate(turns=self.turns)
        return self.turns


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint. `url`: without `/chat/completions`. `key`: empty for none."""

    url: str = field(repr=False)
    key: str = field(repr=False)
    _client: httpx2.AsyncClient = field(repr=False)

    @property
    def place(self) -> str:
        """The address for messages, which has no password."""
        return without_credentials(self.url)

    async def complete(self, request: JsonObject) -> JsonObject:
        """The completion of a request, tried again after failures that may pass. Raises ModelFailedError."""
        body = json.dumps(request).encode()
        for number in range(TRIES):
            is_last = number == TRIES - 1
            delay = 2.0**number
            try:
                status, headers, answer = await self._send(body)
            except (httpx2.TransportError, httpx2.InvalidURL) as error:
                why = without_credentials(str(error)) or type(error).__name__
                if is_last:
                    raise ModelFailedError(f"the model at {self.place} cannot be reached: {why}") from error
            else:
                if status == 200:
                    with suppress(ValueError, RecursionError):
                        if (completion := as_object(json.loads(answer))) is not None:
                            return completion
                    raise ModelFailedError(
                        f"the model at {self.place} answered with something other than JSON"
                    )
                text = " ".join(answer.decode("utf-8", "replace").split())
                text = text.replace(self.key, "[key]") if self.key else text
                failure = f"the model at {self.place} answered {status}: {text[:_MESSAGE_CHARACTERS]}"
                if status in TOO_LONG:
                    raise RequestRefusedError(failure)
                if is_last or status not in PASSING:
                    raise ModelFailedError(failure)
                delay = _asked_delay(headers, delay)
            await anyio.sleep(delay)
        raise AssertionError("the last try has raised")

    async def _send(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of an answer.

        Raises TransportError, and ModelFailedError for an answer that is long or compressed.
        """
        # Not compressed: 400 KB of an answer can become 400 MiB before its length is known.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        answer = bytearray()
        path = f"{self.url}/chat/completions"
        async with self._client.stream("POST", path, content=body, headers=headers) as response:
            if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise ModelFailedError(f"the model at {self.place} compresses its answers, unasked")
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ModelFailedError(
                        f"the model at {self.place} answered with more than {MAX_ANSWER_BYTES >> 20} MiB"
                    )
            return response.status_code, response.headers, bytes(answer)


@asynccontextmanager
async def model_endpoint(url: str | None) -> AsyncGenerator[Endpoint]:
    """The endpoint at a URL, by default at `OPENAI_BASE_URL`, else OpenAI's. Raises BadRequestError."""
    chosen = (
        (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/").removesuffix("/chat/completions")
    )
    key = os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise BadRequestError(f"{KEY_VARIABLE} has a character that no key has, such as a line feed")
    if not key and chosen == DEFAULT_URL:
        raise BadRequestError(
            f"{KEY_VARIABLE} is not set: give the key there, or name another endpoint with --base-url"
        )
    if not chosen.startswith(("http://", "https://")):
        raise BadRequestError(f"--base-url {quoted(without_credentials(chosen))}: http or https was expected")
    timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    async with httpx2.AsyncClient(timeout=timeout) as client:
        yield Endpoint(chosen, key, client)


def _message_of(completion: JsonObject) -> JsonObject:
    """The model's message, as it is sent back. Raises ModelFailedError if there is none."""
    choices: Sequence[JsonObject] = as_objects(completion.get("choices"))
    message = as_object(choices[0].get("message")) if choices else None
    if message is None:
        raise ModelFailedError("the model's answer has no message in `choices`")
    return {"role": "assistant", **{name: value for name, value in message.items() if value is not None}}


def _usage_of(completion: JsonObject) -> dict[str, float]:
    """The model's tokens."""
    counted: Mapping[str, Any] = as_object(completion.get("usage")) or {}
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    return {
        name: counted[theirs]
        for name, theirs in names.items()
        if isinstance(counted.get(theirs), int) and 0 <= counted[theirs] < 1 << 31
    }


def _asked_delay(headers: Mapping[str, str], default: float) -> float:
    """How long the endpoint asks to wait, within bounds."""
    try:
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        return default
    return min(asked, MAX_DELAY_SECONDS) if asked >= 0 else default
