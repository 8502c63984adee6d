"""A closed attempt as it is kept on disk, so that it can be graded again later.

`attempt.json` has everything but the files and the calls; the calls are in `trajectory.jsonl`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import msgspec
from pydantic import ValidationError

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.types import JsonObject, Language, as_object

ATTEMPT_FILE: Final = "attempt.json"
KEPT_WORKSPACE: Final = "workspace.tar.gz"
"""The captured workspace. It comes out of the agent's sandbox, so nothing in it is trusted."""
KEPT_SEALED: Final = "sealed.tar.gz"
"""The task's folder as preprocess left it, with names relative to that folder."""
ORIGINAL_FILE: Final = "sealed.json"
"""What was in the task's folder before preprocess: `archives.overlay.content_ids` as member `files`."""
VERSION = 1
_ATTEMPT_FIELDS = {member.name for member in fields(Attempt)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAttempt:
    """One closed attempt, as it is in `attempt.json`.

    `attempt` has no calls when it was read from a file. `task_id` is the task's id within its suite,
    `language` that of the task. `in_place`: it was graded in the agent's sandbox, of which nothing is kept.
    `sealed`: preprocess has changed the task's folder, so that `KEPT_SEALED` exists.
    """

    attempt: Attempt
    task_id: str
    language: Language
    in_place: bool
    sealed: bool

    def to_json(self) -> JsonObject:
        attempt = msgspec.to_builtins(replace(self.attempt, calls=()), enc_hook=Facts.noted)
        del attempt["calls"]
        # The facts are members of the attempt there, as they are of its verdict.
        return {
            "version": VERSION,
            "attempt": {**attempt.pop("facts"), **attempt},
            "task_id": self.task_id,
            "language": self.language,
            "in_place": self.in_place,
            "sealed": self.sealed,
        }

    @classmethod
    def parse(cls, values: JsonObject) -> Self:
        """Read the content of `attempt.json`. Raises BadRequestError."""
        # Not a pydantic model: those refuse texts with lone surrogates, which an agent can send.
        if values.get("version") != VERSION:
            raise BadRequestError(
                f"{ATTEMPT_FILE} has version {values.get('version')!r}; this release reads version {VERSION}"
            )
        attempt = dict(as_object(values.get("attempt")) or {})
        facts = {name: attempt.pop(name) for name in attempt.keys() - _ATTEMPT_FIELDS}
        try:
            return msgspec.convert(
                {**values, "attempt": {**attempt, "facts": facts}},
                cls,
                dec_hook=_read_facts,
            )
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{ATTEMPT_FILE} is damaged: {error}") from None


def _read_facts(kind: type[Facts], values: Any) -> Facts:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None


# Attempts are read in several threads. msgspec 0.22 describes a dataclass at its first use, and two threads
# that do so at once end the process by SIGSEGV; a decoder describes it here.
msgspec.json.Decoder(KeptAttempt)
