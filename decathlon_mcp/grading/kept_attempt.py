"""A closed attempt as it is kept on disk, so that it can be graded again later.

`attempt.json` has everything but the files and the calls; the calls are in `trajectory.jsonl`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

import msgspec

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.types import JsonObject, Language

ATTEMPT_FILE: Final = "attempt.json"
KEPT_WORKSPACE: Final = "workspace.tar.gz"
"""The captured workspace. It comes out of the agent's sandbox, so nothing in it is trusted."""
KEPT_SEALED: Final = "sealed.tar.gz"
"""The task's folder as preprocess left it, with names relative to that folder."""
ORIGINAL_FILE: Final = "sealed.json"
"""What was in the task's folder before preprocess: `archives.overlay.content_ids` as member `files`."""
VERSION = 1


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
        values = msgspec.to_builtins(replace(self, attempt=replace(self.attempt, calls=())))
        del values["attempt"]["calls"]
        return {"version": VERSION, **values}

    @classmethod
    def parse(cls, values: JsonObject) -> Self:
        """Read the content of `attempt.json`. Raises BadRequestError."""
        # Not a pydantic model: those refuse texts with lone surrogates, which an agent can send.
        if values.get("version") != VERSION:
            raise BadRequestError(
                f"{ATTEMPT_FILE} has version {values.get('version')!r}; this release reads version {VERSION}"
            )
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{ATTEMPT_FILE} is damaged: {error}") from None


# Attempts are read in several threads. msgspec 0.22 describes a dataclass at its first use, and two threads
# that do so at once end the process by SIGSEGV; a decoder describes it here.
msgspec.json.Decoder(KeptAttempt)
