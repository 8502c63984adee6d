"""The verdict: the versioned, signed object that carries the reward of an attempt.

Its member `signature` covers all the others (see `signing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from decathlon_mcp.grading.attempt import DETAIL_CHARACTERS, Attempt, Facts, without_surrogates
from decathlon_mcp.sandboxes.base import Isolation, LimitName
from decathlon_mcp.types import JsonObject, Network

Status: TypeAlias = Literal[
    "scored", "forfeited", "evaluator_error", "sandbox_lost", "set_up_failed", "not_evaluated"
]
REWARDED: Final[frozenset[Status]] = frozenset({"scored", "forfeited"})
"""The statuses with a reward. A forfeited attempt has 0.0."""
VERSION = 1
ALGORITHM: Final = "Ed25519"
OUTPUT_CHARACTERS = 8192
UNCAUGHT_CHARACTERS = 500
MAX_NUMBER = 2.0**53 - 1
"""Largest absolute value of a number in a verdict."""
# JavaScript writes larger whole numbers without a fraction or an exponent. Read as integers elsewhere, they
# have no canonical form (RFC 8785, appendix D), and the verdict's signature could not be checked.

_LEFT_OUT = (
    *("labels", "suite_changed", "suite_release", "dense", "coerced_arguments", "uncaught", "unlimited"),
    *("preprocess_failure", "prepared", "signature"),
)
"""Members of a verdict that its JSON form lacks if they are empty, None or false."""


def _bounded(number: float) -> float:
    if not is_bounded(number):
        raise ValueError(f"not a finite number of at most {MAX_NUMBER:.0f}")
    return number


def is_bounded(number: float) -> bool:
    """Whether a verdict may contain this number: it is finite and at most `MAX_NUMBER`, in absolute value."""
    return math.isfinite(number) and abs(number) <= MAX_NUMBER


Number: TypeAlias = Annotated[float, AfterValidator(_bounded)]


class Signature(BaseModel):
    """`key` is the id of the public key, `value` the signature in base64."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Literal["Ed25519"]
    key: str
    value: str


class Verdict(Facts):
    """The result of one attempt. Only `scored` and `forfeited` attempts have `success` and `reward`.

    `forfeited`: the attempt could not be graded for a reason that the agent may have caused, or a limit ended
    it and the suite does not grade such attempts (`truncated` is true then); the reward is 0.0. In all other
    statuses the infrastructure or the task failed, which is no zero. Plug-ins add members of their own.
    """

    version: Literal[1] = VERSION
    episode: str
    """The episode's public id: 16 hexadecimal digits of its handle's SHA-256, which give no access."""
    labels: dict[str, str] = Field(default_factory=dict[str, str])
    """The labels that the client gave the episode."""
    task: str
    suite: str
    evaluator_digest: str | None = None
    """Covers the evaluator's files and the groundtruth that were used."""
    status: Status
    success: bool | None = None
    """The evaluator exited with 0 and, where the suite requires it, the agent claimed the task."""
    reward: Number | None = None
    metrics: dict[str, Number] = Field(default_factory=dict[str, Number])
    """The values that the rubric's function returned, and the server's own counts."""
    weights: dict[str, Number] = Field(default_factory=dict[str, Number])
    """The weights of the metrics that make up the reward."""
    claimed: bool
    truncated: bool
    in_place: bool = False
    """The evaluator ran in the agent's own sandbox."""
    isolation: Isolation
    unlimited: tuple[LimitName, ...] = ()
    """Limits that the provider, although it isolates, could not enforce on the sandboxes."""
    agent_network: Network
    grader_network: Network
    evaluator_output: str = ""
    """The end of what the evaluator printed; it is shown and never parsed."""
    uncaught: str = ""
    """The exception with which the evaluator or the rubric's function ended, as `TYPE: MESSAGE`; the reward
    is then 0.0."""
    detail: str = ""
    """Explains the status to people."""
    refused: tuple[str, ...] = ()
    """What was left out of the workspace or changed in it before grading."""
    started_at: str | None = None
    claimed_at: str | None = None
    scored_at: str | None = None
    seconds: float = 0.0
    """Duration of the grading."""
    signature: Signature | None = None

    @model_validator(mode="after")
    def _reward_only_when_rewarded(self) -> Self:
        rewarded = self.status in REWARDED
        if (self.reward is not None) is not rewarded or (self.success is not None) is not rewarded:
            raise ValueError("a verdict has success and reward when scored or forfeited, and only then")
        if self.status == "forfeited" and (self.reward or self.success):
            raise ValueError("a forfeited attempt has no success and a reward of 0")
        return self

    def to_json(self) -> JsonObject:
        """The JSON form.

        Without `success` and `reward` where there is no reward, and without empty members of `_LEFT_OUT`.
        """
        absent = set[str]() if self.status in REWARDED else {"success", "reward"}
        absent |= {name for name in _LEFT_OUT if not getattr(self, name)}
        values = self.model_dump(mode="json", exclude=absent)
        return {name: values[name] for name in sorted(values, key=Facts.model_fields.__contains__)}

    def text(self) -> str:
        """One line for people."""
        detail = " ".join(self.detail.split()) or "no details"
        if self.status not in REWARDED:
            return f"No verdict ({self.status}): {detail}"
        if self.status == "forfeited":
            return f"Reward 0.0: the attempt was forfeited: {detail}"
        parts = [f"Reward {_short(self.reward)}: the attempt {'succeeded' if self.success else 'failed'}"]
        terms = [
            f"{name} {_short(self.metrics[name])} × {_short(weight)}" for name, weight in self.weights.items()
        ]
        if terms:
            parts.append(f" ({', '.join(terms)})")
        if self.uncaught:
            parts.append(f", ended by an uncaught exception: {self.uncaught}")
        if not self.claimed:
            parts.append(", not claimed by the agent")
        if self.truncated:
            parts.append(", closed by a limit")
        return "".join(parts) + "."


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an evaluation: a score, or the status that says why there is none."""

    status: Status
    success: bool | None = None
    """Set if and only if the status is `scored`, as is the reward."""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The metrics that the attempt itself does not know."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """The weights of the metrics that make up the reward."""
    output: str = ""
    """What the evaluator printed."""
    uncaught: str = ""
    """The exception that ended the evaluator or the rubric's function."""
    detail: str = ""
    """Explains the status to people."""


def build_verdict(
    attempt: Attempt,
    outcome: Outcome,
    *,
    evaluator_digest: str | None = None,
    refused: tuple[str, ...] = (),
    in_place: bool = False,
    seconds: float = 0.0,
) -> Verdict:
    """Combine an attempt and the outcome of its evaluation; long texts are cut to their end."""
    forfeited = outcome.status == "forfeited"
    return Verdict(
        episode=attempt.episode,
        labels=dict(attempt.labels),
        task=attempt.task,
        suite=attempt.suite,
        evaluator_digest=evaluator_digest,
        status=outcome.status,
        success=False if forfeited else outcome.success,
        reward=0.0 if forfeited else outcome.reward,
        metrics={**attempt.counts, **outcome.metrics},
        weights=dict(outcome.weights),
        claimed=attempt.claimed,
        truncated=attempt.truncated,
        in_place=in_place,
        isolation=attempt.isolation,
        unlimited=attempt.unlimited,
        agent_network=attempt.agent_network,
        grader_network=attempt.grader_network,
        evaluator_output=without_surrogates(outcome.output[-OUTPUT_CHARACTERS:]),
        uncaught=without_surrogates(" ".join(outcome.uncaught.split())[:UNCAUGHT_CHARACTERS]),
        detail=without_surrogates(outcome.detail[-DETAIL_CHARACTERS:]),
        refused=tuple(map(without_surrogates, refused)),
        started_at=_iso(attempt.started_at),
        claimed_at=_iso(attempt.claimed_at),
        scored_at=_iso(datetime.now(UTC)) if outcome.status in REWARDED else None,
        seconds=seconds,
        **attempt.facts.noted(),
    )


def verdict_without_grading(attempt: Attempt, *, status: Status, detail: str) -> Verdict:
    """The verdict of an attempt that was never evaluated; the status is not `scored`."""
    return build_verdict(attempt, Outcome(status=status, detail=detail))


def _short(number: float | None) -> str:
    return str(round(number or 0.0, 6))


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="milliseconds")
