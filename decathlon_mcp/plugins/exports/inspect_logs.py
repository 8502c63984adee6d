"""Logs of inspect-ai, for `inspect view` and its data frames: up to LOG_EPISODES of a run and a model each.

A sample is an episode, its epoch the number of the attempt at its task. A lost episode is a sample with an
error and without scores. Long replies are cut: inspect-ai has a log wholly in memory.

Messages are there twice: inspect-ai shows a sample's messages, but its data frames read its events' messages.
Each message of the assistant is an event of the model, and each call an event of a tool.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from sys import getsizeof
from typing import Any

from inspect_ai.event import Event, ModelEvent, ToolEvent
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    EventsData,
    write_eval_log,
)
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolCallError

from decathlon_mcp.plugins.exports.exported_episodes import ExportedEpisode, parse_json, utf8, value_of
from decathlon_mcp.plugins.history.values import CallEntry, EpisodeSummary, NoteEntry
from decathlon_mcp.types import JsonObject, as_object

LOG_EPISODES = 200
LOG_BYTES = 56 << 20
"""Size from which a log has fewer episodes. Writing takes up to half as much again."""
ENTRY_BYTES = 10 << 10
"""Size of a call or note beside its text: messages and events have many members. Each text is there twice."""
MAX_ENTRIES = 3_000
"""Calls and notes of an episode that are written, so that one is not larger than a log."""
EPISODE_BYTES = 8 << 20
"""Size of an episode's texts from which on replies are cut to CUT_BYTES."""
VALUE_BYTES, CUT_BYTES = 16 << 10, 500
NO_MODEL = "unknown/unknown"
_CONFIG = GenerateConfig()
"""Of all events of models: it has many members, and events are many."""


@dataclass(slots=True)
class _Log:
    """Samples of a run and a model that are not written yet. `epochs`: used numbers, also in earlier logs."""

    run: str
    model: str
    samples: list[EvalSample] = field(default_factory=list[EvalSample])
    size_bytes: int = 0
    written: int = 0
    epochs: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Conversation:
    """The messages of an episode, and its events."""

    public_id: str
    model: str
    start: float
    """Of the episode, in Unix seconds."""
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    events: list[Event] = field(default_factory=list[Event])
    left_out: int = 0
    """Number of calls and notes that are not there."""
    entries: int = 0
    text_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.entries * ENTRY_BYTES + 2 * self.text_bytes

    def add(self, message: ChatMessage) -> None:
        message.id = f"{self.public_id}-{len(self.messages)}"
        self.messages.append(message)

    def add_note(self, note: NoteEntry) -> None:
        text = utf8(note.text.raw) or ""
        match note.role:
            case "system":
                self.add(ChatMessageSystem(content=text))
            case "user":
                self.add(ChatMessageUser(content=text))
            case "server":  # not of the conversation
                return
            case role:
                content = [ContentReasoning(reasoning=text)] if role == "reasoning" else text
                self._add_turn(
                    ChatMessageAssistant(content=content),
                    note.time,
                    _usage(note.usage) if note.usage else None,
                )
        self.entries += 1
        self.text_bytes += getsizeof(text)

    def add_call(self, entry: CallEntry) -> None:
        """A message of the assistant, or the last one, with the tool's answer."""
        limit = VALUE_BYTES if self.text_bytes < EPISODE_BYTES else CUT_BYTES
        arguments, reply, problem = _arguments(entry, limit), *_reply(entry, limit)
        call = ToolCall(id=f"call_{entry.seq}", function=utf8(entry.name) or "", arguments=arguments)
        error = None if problem is None else ToolCallError("unknown", problem)
        last, seconds = self.messages[-1] if self.messages else None, entry.seconds or 0.0
        if isinstance(last, ChatMessageAssistant) and not last.tool_calls:
            last.tool_calls = [call]
        else:
            self._add_turn(ChatMessageAssistant(content="", tool_calls=[call]), entry.time)
        self.add(ChatMessageTool(content=reply, tool_call_id=call.id, function=call.function, error=error))
        self.events.append(
            ToolEvent(
                uuid=f"{self.public_id}-tool-{entry.seq}",
                id=call.id,
                function=call.function,
                arguments=arguments,
                result=reply,
                error=error,
                failed=error is not None,
                timestamp=_date(entry.time),
                completed=_date(entry.time + seconds),
                working_start=entry.time - self.start,
                working_time=seconds,
                message_id=self.messages[-1].id,
            )
        )
        written = "" if entry.arguments is None else entry.arguments.raw[:limit]
        self.entries += 1
        self.text_bytes += getsizeof(reply) + getsizeof(written)

    def end(self, time: float) -> None:
        """Give the last replies an event: frames have only messages before one, or of one, of the model."""
        if self.messages and not isinstance(self.messages[-1], ChatMessageAssistant):
            self._add_model_event(ModelOutput(model=self.model), time)

    def _add_turn(self, message: ChatMessageAssistant, time: float, usage: ModelUsage | None = None) -> None:
        choices = [ChatCompletionChoice(message=message)]
        self._add_model_event(ModelOutput(model=self.model, choices=choices, usage=usage), time)
        self.add(message)

    def _add_model_event(self, output: ModelOutput, time: float) -> None:
        # The input is all messages so far, as places in `events_data`: whole it would grow with the square.
        self.events.append(
            ModelEvent(
                uuid=f"{self.public_id}-model-{len(self.events)}",
                model=self.model,
                input=[],
                input_refs=[(0, len(self.messages))] if self.messages else None,
                tools=[],
                tool_choice="auto",
                config=_CONFIG,
                output=output,
                timestamp=_date(time),
                working_start=time - self.start,
            )
        )


def log_of(summary: EpisodeSummary) -> tuple[str, str]:
    """The run and the model whose logs an episode is in; the run is empty if it has none."""
    return summary.labels.get("run") or "", summary.labels.get("model") or NO_MODEL


def write_inspect_logs(episodes: Iterable[ExportedEpisode], folder: Path) -> int:
    """Write the logs into a folder; the number of episodes. A log's episodes must follow each other."""
    count = 0
    for key, group in groupby(episodes, lambda episode: log_of(episode.details.summary)):
        log = _Log(*key)
        for episode in group:
            count += 1
            conversation = _conversation(episode, log.model)
            size = log.size_bytes + conversation.size_bytes
            if len(log.samples) == LOG_EPISODES or (log.samples and size > LOG_BYTES):
                _write(log, folder)
            log.samples.append(_sample(episode, log, conversation))
            log.size_bytes += conversation.size_bytes
        _write(log, folder)
    return count


def _write(log: _Log, folder: Path) -> None:
    log.written += 1
    samples = log.samples
    started = min(sample.started_at or "" for sample in samples)
    name = f"{_file_name(log.run or 'no-run')}_{_file_name(log.model)}_{log.written:04d}"
    scored = [sample for sample in samples if sample.scores]
    spec = EvalSpec(
        eval_id=name,
        run_id=log.run,
        task_id=name,
        created=started,
        task="tool_decathlon",
        dataset=EvalDataset(
            name="tool-decathlon",
            samples=len(samples),
            sample_ids=list(dict.fromkeys(sample.id for sample in samples)),
        ),
        model=log.model,
        config=EvalConfig(epochs=max(sample.epoch for sample in samples)),
        metadata={"run": log.run or None, "log": log.written},
    )
    # `exists`: files of runs whose names differ only in characters that file names cannot have.
    file = folder / f"{name}.eval"
    while file.exists():
        file = file.with_stem(f"{file.stem}_")
    write_eval_log(
        EvalLog(
            status="success",
            eval=spec,
            results=EvalResults(
                total_samples=len(samples),
                completed_samples=len(scored),
                scores=[_mean_score(scorer, scored, len(samples)) for scorer in ("reward", "success")],
            ),
            stats=EvalStats(
                started_at=started, completed_at=max(sample.completed_at or started for sample in samples)
            ),
            samples=samples,
        ),
        str(file),
    )
    log.samples, log.size_bytes = [], 0


def _mean_score(name: str, scored: list[EvalSample], total: int) -> EvalScore:
    values = [float((sample.scores or {})[name].as_float()) for sample in scored]
    metrics = {"mean": EvalMetric(name="mean", value=sum(values) / len(values))} if values else {}
    return EvalScore(
        name=name,
        scorer=name,
        scored_samples=len(values),
        unscored_samples=total - len(values),
        metrics=metrics,
    )


def _sample(episode: ExportedEpisode, log: _Log, conversation: _Conversation) -> EvalSample:
    values = episode.to_json()
    summary, task = episode.details.summary, values["task"]
    log.epochs[task] += 1
    verdict, error = values.pop("verdict"), None
    scores = None
    if summary.is_lost:
        has_more = summary.cause and summary.cause != summary.reason
        text = f"{summary.reason}{f': {summary.cause}' if has_more else ''}"
        error = EvalError(message=text, traceback="", traceback_ansi="")
    else:
        scores = {
            "reward": Score(value=summary.reward or 0.0, metadata=verdict),
            "success": Score(value=float(bool(summary.success))),
        }
    prompt = values.pop("prompt")["task"]
    started = summary.started_at
    return EvalSample(
        id=task,
        epoch=log.epochs[task],
        input=utf8(prompt) or task,
        target="",
        messages=conversation.messages,
        output=_output(log.model, conversation.messages),
        events=conversation.events,
        events_data=EventsData(messages=conversation.messages, calls=[]),
        scores=scores,
        error=error,
        metadata=_clean(
            {
                "episode": summary.public_id,
                **values,
                "verdict": verdict if error else None,
                "left_out": conversation.left_out,
            }
        ),
        model_usage={log.model: _total_usage(episode)},
        started_at=_time(started),
        completed_at=_time(summary.ended_at or started),
        total_time=(summary.ended_at or started) - started,
        uuid=summary.public_id,
    )


def _output(model: str, messages: list[ChatMessage]) -> ModelOutput:
    last = next(
        (message for message in reversed(messages) if isinstance(message, ChatMessageAssistant)), None
    )
    return ModelOutput(model=model) if last is None else ModelOutput.from_content(model, last.text)


def _total_usage(episode: ExportedEpisode) -> ModelUsage:
    notes = [entry.usage for entry in episode.entries(0) if isinstance(entry, NoteEntry)]
    return _usage({name: sum(note.get(name, 0) for note in notes) for name in set().union(*notes)})


def _usage(counts: Mapping[str, float]) -> ModelUsage:
    read, written = (int(counts.get(name, 0)) for name in ("input_tokens", "output_tokens"))
    return ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


def _conversation(episode: ExportedEpisode, model: str) -> _Conversation:
    details, summary = episode.details, episode.details.summary
    result = _Conversation(summary.public_id, model, summary.started_at)
    for text, kind in ((details.system_prompt, ChatMessageSystem), (details.task_prompt, ChatMessageUser)):
        if text is not None and text.raw:
            result.add(kind(content=utf8(text.raw) or ""))
    for entry in islice(episode.entries(VALUE_BYTES), MAX_ENTRIES):
        if isinstance(entry, NoteEntry):
            result.add_note(entry)
        else:
            result.add_call(entry)
    result.end(summary.ended_at or summary.started_at)
    result.left_out = max(0, details.calls + details.notes - MAX_ENTRIES)
    return result


def _arguments(entry: CallEntry, limit: int) -> JsonObject:
    text = entry.arguments
    if text is None:
        return {}
    value = as_object(value_of(text)) if len(text.raw) <= limit else None
    return _clean(value) if value is not None else {"cut": _cut(text.raw, limit, text.size_bytes)}


def _reply(entry: CallEntry, limit: int) -> tuple[str, str | None]:
    """The text of a reply, and of the error if the call failed."""
    if entry.reply is None:
        return "", "there is no reply"
    text = entry.reply.raw
    if not entry.reply.truncated:
        with suppress(ValueError, RecursionError):
            text = _text_of(parse_json(text)) or text
    shown = _cut(text, limit, entry.reply.size_bytes)
    return shown, shown if entry.failed or entry.reply_kind != "result" else None


def _text_of(reply: Any) -> str:
    """What a model reads of a result of MCP, or of an error."""
    value = as_object(reply) or {}
    parts = value.get("content")
    if not isinstance(parts, list):
        return str(value.get("message") or "")
    texts: list[str] = []
    for part in parts:  # pyright: ignore[reportUnknownVariableType]
        one = as_object(part) or {}
        text = one.get("text")
        texts.append(text if isinstance(text, str) else f"({one.get('type')})")
    return "\n".join(texts)


def _cut(text: str, limit: int, size_bytes: int) -> str:
    text = utf8(text) or ""
    return text if len(text) <= limit else f"{text[:limit]}… ({size_bytes} bytes)"


def _clean(value: Any) -> Any:
    """The value without lone surrogates, which inspect-ai cannot write."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, dict):
        return {utf8(str(name)): _clean(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [_clean(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _date(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _time(seconds: float) -> str:
    return _date(seconds).isoformat()


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)[:80]
