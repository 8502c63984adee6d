"""Logs of inspect-ai, for `inspect view` and its data frames: up to LOG_EPISODES of a run and a model each.

A sample is an episode, its epoch the number of the attempt at its task. A lost episode is a sample with an
error and without scores. Long replies are cut: inspect-ai has a log wholly in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
    write_eval_log,
)
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolCallError

from decathlon_mcp.exports.episodes import ExportedEpisode, parse_json, utf8, value_of
from decathlon_mcp.storage.history.values import CallEntry, NoteEntry
from decathlon_mcp.types import JsonObject, as_object

LOG_EPISODES = 200
LOG_BYTES = 8 << 20
"""Text from which a log is written with fewer episodes."""
EPISODE_BYTES = 4 << 20
"""Text of an episode from which on replies are cut to CUT_BYTES."""
VALUE_BYTES, CUT_BYTES = 16 << 10, 500
NO_MODEL = "unknown/unknown"


@dataclass(slots=True)
class _Log:
    """Samples of a run and a model that are not written yet. `epochs`: those used, also in earlier logs."""

    run: str | None
    model: str
    samples: list[EvalSample] = field(default_factory=list[EvalSample])
    size_bytes: int = 0
    written: int = 0
    epochs: Counter[str] = field(default_factory=Counter[str])


def write_inspect_logs(episodes: Iterable[ExportedEpisode], folder: Path) -> int:
    """Write the logs into a folder; the number of episodes."""
    logs: dict[tuple[str | None, str], _Log] = {}
    count = 0
    for count, episode in enumerate(episodes, 1):  # noqa: B007
        labels = episode.details.summary.labels
        key = (labels.get("run"), labels.get("model") or NO_MODEL)
        log = logs.setdefault(key, _Log(*key))
        messages, size = _messages(episode)
        log.samples.append(_sample(episode, log, messages))
        log.size_bytes += size
        if len(log.samples) == LOG_EPISODES:
            _write(log, folder)
        while sum(one.size_bytes for one in logs.values()) > LOG_BYTES:
            _write(max(logs.values(), key=lambda one: one.size_bytes), folder)
    for log in logs.values():
        if log.samples:
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
        run_id=log.run or "",
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
        metadata={"run": log.run, "log": log.written},
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


def _sample(episode: ExportedEpisode, log: _Log, messages: list[ChatMessage]) -> EvalSample:
    values = episode.to_json()
    summary, task = episode.details.summary, values["task"]
    log.epochs[task] += 1
    verdict, error = values.pop("verdict"), None
    scores = None
    if summary.is_lost:
        text = f"{summary.reason}{f': {summary.cause}' if summary.cause else ''}"
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
        messages=messages,
        output=_output(log.model, messages),
        scores=scores,
        error=error,
        metadata=_clean({"episode": summary.public_id, **values, "verdict": verdict if error else None}),
        model_usage={log.model: _usage(episode)},
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


def _usage(episode: ExportedEpisode) -> ModelUsage:
    counts = Counter[str]()
    for entry in episode.entries(0):
        if isinstance(entry, NoteEntry):
            counts.update(entry.usage)
    total = counts["input_tokens"] + counts["output_tokens"]
    return ModelUsage(
        input_tokens=counts["input_tokens"], output_tokens=counts["output_tokens"], total_tokens=total
    )


def _messages(episode: ExportedEpisode) -> tuple[list[ChatMessage], int]:
    """The conversation: notes are messages, a call is a message of the assistant with the tool's answer."""
    messages: list[ChatMessage] = []
    for text, kind in (
        (episode.details.system_prompt, ChatMessageSystem),
        (episode.details.task_prompt, ChatMessageUser),
    ):
        if text is not None and text.raw:
            messages.append(kind(content=utf8(text.raw) or ""))
    size = 0
    for entry in episode.entries(VALUE_BYTES):
        if isinstance(entry, NoteEntry):
            messages.append(_note_message(entry))
            size += len(entry.text.raw)
            continue
        limit = VALUE_BYTES if size < EPISODE_BYTES else CUT_BYTES
        arguments, reply, error = _arguments(entry, limit), *_reply(entry, limit)
        call = ToolCall(id=f"call_{entry.seq}", function=utf8(entry.name) or "", arguments=arguments)
        last = messages[-1] if messages else None
        if isinstance(last, ChatMessageAssistant) and not last.tool_calls and last.role == "assistant":
            last.tool_calls = [call]
        else:
            messages.append(ChatMessageAssistant(content="", tool_calls=[call]))
        messages.append(
            ChatMessageTool(
                content=reply,
                tool_call_id=call.id,
                function=call.function,
                error=ToolCallError("unknown", error) if error is not None else None,
            )
        )
        size += len(reply) + (0 if entry.arguments is None else min(limit, len(entry.arguments.raw)))
    for number, message in enumerate(messages):
        message.id = f"{episode.details.summary.public_id}-{number}"
    return messages, size


def _note_message(note: NoteEntry) -> ChatMessage:
    text = utf8(note.text.raw) or ""
    match note.role:
        case "system":
            return ChatMessageSystem(content=text)
        case "user":
            return ChatMessageUser(content=text)
        case "reasoning":
            return ChatMessageAssistant(content=[ContentReasoning(reasoning=text)])
        case _:
            return ChatMessageAssistant(content=text)


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


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)[:80]
