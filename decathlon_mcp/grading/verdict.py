"""What an evaluation says: the one versioned object that a reward travels in.

It carries its own signature, as its member `signature`, over all the others (`signing.py`).
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.sandboxes.base import Isolation
from decathlon_mcp.types import JsonObject, Network

Status: TypeAlias = Literal[
    "scored", "evaluator_error", "timeout", "sandbox_lost", "set_up_failed", "not_evaluated"
]
VERSION = 1
ALGORITHM: Final = "Ed25519"
OUTPUT_CHARACTERS = 8192
DETAIL_CHARACTERS = 4000


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


Number: TypeAlias = Annotated[float, AfterValidator(_finite)]


class Signature(BaseModel):
    """By whom: `key` is the public key's id, `value` the signature in base64."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Literal["Ed25519"]
    key: str
    value: str


class Verdict(BaseModel):
    """What came of one attempt. No verdict is not a zero: only `scored` has `success` and `reward`.

    `success` is the evaluator's exit status and, where the suite requires it, the agent's own claim.
    `metrics` are what the rubric's function returned and what the server counted; those of them that count
    stand in `weights`. `evaluator_output` is the last of what the evaluator printed: never read, only shown.
    `refused` lists what of the workspace did not cross to the grader. `seconds` is what the grading took.
    `evaluator_digest` is over the evaluator's files and the groundtruth as they were graded with
    (`digest.py`), `image_digest` the sandboxes' image as the engine knows it; None where there was none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = VERSION
    episode: str
    task: str
    suite: str
    suite_revision: str
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
    agent_network: Network
    grader_network: Network
    evaluator_output: str = ""
    detail: str = ""
    refused: tuple[str, ...] = ()
    started_at: str | None = None
    claimed_at: str | None = None
    scored_at: str | None = None
    seconds: float = 0.0
    signature: Signature | None = None

    @model_validator(mode="after")
    def _reward_only_when_scored(self) -> Self:
        scored = self.status == "scored"
        if (self.reward is not None) is not scored or (self.success is not None) is not scored:
            raise ValueError("a verdict has success and reward when it is scored, and only then")
        return self

    def to_json(self) -> JsonObject:
        """As kept and sent: `success` and `reward` only when it is scored, a signature once there is one."""
        absent = set[str]() if self.status == "scored" else {"success", "reward"}
        if self.signature is None:
            absent.add("signature")
        return self.model_dump(mode="json", exclude=absent)

    def text(self) -> str:
        """The one line that goes with it as tool output."""
        if self.status != "scored":
            return f"No verdict ({self.status}): {' '.join(self.detail.split()) or 'no more is known'}"
        words = [f"Reward {_short(self.reward)}: the attempt {'succeeded' if self.success else 'failed'}"]
        counted = [
            f"{name} {_short(self.metrics[name])} × {_short(weight)}" for name, weight in self.weights.items()
        ]
        if counted:
            words.append(f" ({', '.join(counted)})")
        if not self.claimed:
            words.append(", not claimed by the agent")
        if self.truncated:
            words.append(", closed by a limit")
        return "".join(words) + "."


def verdict_without_grading(attempt: Attempt, *, status: Status, detail: str, **more: Any) -> Verdict:
    """The verdict of an attempt that has no score; `more` are fields of `Verdict`."""
    return verdict_of(attempt, status=status, detail=detail, **more)


def verdict_of(attempt: Attempt, *, detail: str = "", evaluator_output: str = "", **more: Any) -> Verdict:
    """A verdict with what the attempt knows filled in, its texts bounded; `more` are fields of `Verdict`."""
    fields: dict[str, Any] = {"metrics": attempt.counts, **more}
    return Verdict(
        episode=attempt.episode,
        task=attempt.task,
        suite=attempt.suite,
        suite_revision=attempt.suite_revision,
        image_digest=attempt.image_digest,
        claimed=attempt.claimed,
        truncated=attempt.truncated,
        isolation=attempt.isolation,
        agent_network=attempt.agent_network,
        grader_network=attempt.grader_network,
        detail=_sayable(detail[-DETAIL_CHARACTERS:]),
        evaluator_output=_sayable(evaluator_output[-OUTPUT_CHARACTERS:]),
        started_at=_iso(attempt.started_at),
        claimed_at=_iso(attempt.claimed_at),
        scored_at=_iso(datetime.now(UTC)) if fields.get("status") == "scored" else None,
        **fields,
    )


def _sayable(text: str) -> str:
    """Without the half surrogate pairs that a sandbox may send, and JSON in UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _short(number: float | None) -> str:
    return str(round(number or 0.0, 6))


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat(timespec="milliseconds")
