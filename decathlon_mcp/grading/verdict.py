"""The verdict: the versioned, signed object that carries the reward of an attempt.

Its member `signature` covers all the others (see `signing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from decathlon_mcp.grading.attempt import Attempt, BranchPoint
from decathlon_mcp.sandboxes.base import Isolation, LimitName
from decathlon_mcp.suites.release import Release
from decathlon_mcp.types import JsonObject, Network

Status: TypeAlias = Literal[
    "scored", "forfeited", "evaluator_error", "sandbox_lost", "set_up_failed", "not_evaluated"
]
REWARDED: Final[frozenset[Status]] = frozenset({"scored", "forfeited"})
"""The statuses with a reward. That of a forfeited attempt is 0.0."""
VERSION = 1
ALGORITHM: Final = "Ed25519"
OUTPUT_CHARACTERS = 8192
DETAIL_CHARACTERS = 4000
UNCAUGHT_CHARACTERS = 500
MAX_NUMBER = 2.0**53 - 1
"""Largest absolute value of a number in a verdict."""
# JavaScript writes larger whole numbers without a fraction or an exponent. Read as integers elsewhere, they
# have no canonical form (RFC 8785, appendix D), and the verdict's signature could not be checked.

_LEFT_OUT = (
    "branch",
    *("labels", "suite_changed", "suite_release", "dense", "coerced_arguments", "uncaught", "unlimited"),
    *("preprocess_failure", "prepared", "web", "regrading", "signature"),
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


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Signature(_Document):
    """`key` is the id of the public key, `value` the signature in base64."""

    algorithm: Literal["Ed25519"]
    key: str
    value: str


class Regrading(_Document):
    """What a verdict that was made again refers to.

    `verdict` is the digest of the episode's own verdict, `sha256:` and 64 hexadecimal digits over its
    canonical JSON (RFC 8785) with the signature; None if the episode has none. `suite_revision` is that of
    the files with which the attempt was graded again.
    """

    verdict: str | None
    suite_revision: str


class WebUse(_Document):
    """How the requests of the episode's sandboxes to the recorded web were answered.

    `replayed`: from the recording. `recorded`: by the site, and stored. `passed`: by the site, and not
    stored. `missed`: with an error, since the recording has no answer or the site could not be reached.
    `problem`: why something could not be stored.
    """

    mode: Literal["record", "replay", "replay-or-record"]
    replayed: int = 0
    recorded: int = 0
    passed: int = 0
    missed: int = 0
    problem: str = ""


class Verdict(_Document):
    """The result of one attempt. Only `scored` and `forfeited` attempts have `success` and `reward`.

    `forfeited`: the attempt could not be graded for a reason that the agent may have caused, or a limit ended
    it and the suite does not grade such attempts (`truncated` is true then); the reward is 0.0. In all other
    statuses the infrastructure or the task failed, which is no zero.

    `episode` is the episode's public id: 16 hexadecimal digits of its handle's SHA-256, which give no access.
    `labels` are those that the episode's client gave it; absent if there are none. `success` is true if the
    evaluator exited with 0 and, where the suite requires it, the agent claimed the task. `metrics` are the
    values that the rubric's function returned and those that the server counted; `weights` lists the ones
    that make up the reward. `evaluator_output` is the end of what the evaluator printed; it is shown and
    never parsed. `uncaught` is the exception with which the evaluator or the rubric's function ended, as
    `TYPE: MESSAGE`; the reward is then 0.0. `refused` lists what was left out of the workspace or changed in
    it before grading. `suite_revision` is the commit (or a digest) of the task's and the suite's common files
    at the set-up, with a digest of local changes if there are any; `suite_changed` is present and true if the
    checkout changed between the server's start and the set-up, or between the set-up and the grading, so that
    some of the files used are of another revision. `suite_release` is present for Toolathlon: whether the
    checkout is from before Toolathlon-Verified. `preprocess_failure` is present if preprocess failed in a
    suite that ignores that: the exit code and the end of what it printed. `seconds` is the duration of the
    grading. `evaluator_digest` covers the evaluator's files and the groundtruth that were used,
    `image_digest` identifies the image of the sandboxes; None if there was none. `unlimited` is present if
    the provider isolates but could not enforce these limits on the sandboxes. `dense` is present and true if
    memory of the agent's sandbox could be merged with that of others. `coerced_arguments` is present and true
    if arguments that were JSON in strings were replaced by what the schemas of their tools ask for.
    `prepared` is present and true if the agent's sandbox began as a copy of another one that had been set up
    for this task. `web` is present if the task used the recorded web. `branch` is present if the episode
    began where another stood after one of its calls. `regrading` is present if the attempt was graded again
    later; the episode's own verdict has none.
    """

    version: Literal[1] = VERSION
    episode: str
    labels: dict[str, str] = {}
    task: str
    suite: str
    suite_revision: str
    suite_changed: bool = False
    suite_release: Release | None = None
    preprocess_failure: str = ""
    evaluator_digest: str | None = None
    image_digest: str | None = None
    status: Status
    success: bool | None = None
    reward: Number | None = None
    metrics: dict[str, Number] = {}
    weights: dict[str, Number] = {}
    claimed: bool
    truncated: bool
    in_place: bool = False
    isolation: Isolation
    unlimited: tuple[LimitName, ...] = ()
    dense: bool = False
    coerced_arguments: bool = False
    prepared: bool = False
    agent_network: Network
    grader_network: Network
    evaluator_output: str = ""
    uncaught: str = ""
    detail: str = ""
    refused: tuple[str, ...] = ()
    started_at: str | None = None
    claimed_at: str | None = None
    scored_at: str | None = None
    seconds: float = 0.0
    web: WebUse | None = None
    branch: BranchPoint | None = None
    regrading: Regrading | None = None
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

        Without `labels`, `success`, `reward`, `uncaught`, `suite_release`, `preprocess_failure`, `unlimited`,
        `web`, `branch`, `regrading` and `signature` where there are none, and without `suite_changed`,
        `dense`, `coerced_arguments` and `prepared` unless they are true.
        """
        absent = set[str]() if self.status in REWARDED else {"success", "reward"}
        absent |= {name for name in _LEFT_OUT if not getattr(self, name)}
        branch: JsonObject = {} if self.branch is None else {"branch": self.branch.to_json()}
        return {**self.model_dump(mode="json", exclude=absent), **branch}

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
    """The outcome of an evaluation: a score, or the status that says why there is none.

    `success` and `reward` are set if and only if the status is in `REWARDED`. `metrics` are those that the
    attempt itself does not know; `output` is what the evaluator printed; `uncaught` the exception that ended
    it; `detail` explains the status to people.
    """

    status: Status
    success: bool | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    output: str = ""
    uncaught: str = ""
    detail: str = ""

    @classmethod
    def forfeited(cls, detail: str, output: str = "") -> Self:
        """The outcome of an attempt that the agent may have made impossible to grade."""
        return cls(status="forfeited", success=False, reward=0.0, output=output, detail=detail)


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
    return Verdict(
        episode=attempt.episode,
        labels=dict(attempt.labels),
        branch=attempt.branch,
        task=attempt.task,
        suite=attempt.suite,
        suite_revision=attempt.suite_revision,
        suite_changed=attempt.suite_changed,
        suite_release=attempt.suite_release,
        preprocess_failure=_without_surrogates(attempt.preprocess_failure[-DETAIL_CHARACTERS:]),
        evaluator_digest=evaluator_digest,
        image_digest=attempt.image_digest,
        status=outcome.status,
        success=outcome.success,
        reward=outcome.reward,
        metrics={**attempt.counts, **outcome.metrics},
        weights=dict(outcome.weights),
        claimed=attempt.claimed,
        truncated=attempt.truncated,
        in_place=in_place,
        isolation=attempt.isolation,
        unlimited=attempt.unlimited,
        dense=attempt.dense,
        coerced_arguments=attempt.coerced_arguments,
        prepared=attempt.prepared,
        agent_network=attempt.agent_network,
        grader_network=attempt.grader_network,
        evaluator_output=_without_surrogates(outcome.output[-OUTPUT_CHARACTERS:]),
        uncaught=_without_surrogates(" ".join(outcome.uncaught.split())[:UNCAUGHT_CHARACTERS]),
        detail=_without_surrogates(outcome.detail[-DETAIL_CHARACTERS:]),
        refused=tuple(map(_without_surrogates, refused)),
        started_at=_iso(attempt.started_at),
        claimed_at=_iso(attempt.claimed_at),
        scored_at=_iso(datetime.now(UTC)) if outcome.status in REWARDED else None,
        seconds=seconds,
    )


def verdict_without_grading(attempt: Attempt, *, status: Status, detail: str) -> Verdict:
    """The verdict of an attempt that was never evaluated; the status is not `scored`."""
    forfeited = status == "forfeited"
    return build_verdict(
        attempt, Outcome.forfeited(detail) if forfeited else Outcome(status=status, detail=detail)
    )


def _without_surrogates(text: str) -> str:
    # A sandbox may send lone surrogates; JSON in UTF-8 cannot hold them, and they cannot be signed.
    return text.encode("utf-8", "replace").decode()


def _short(number: float | None) -> str:
    return str(round(number or 0.0, 6))


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="milliseconds")
