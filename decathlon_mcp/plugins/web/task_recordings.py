"""What the recordings of the web tell about tasks: whether there is one, and the launch time it fixes."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.web.recording import (
    FOLDER,
    Recording,
    RecordingError,
    RecordingId,
    revisions,
)
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.web")


def recording_id(suite: Suite, task: Task) -> RecordingId:
    """What the recording of a task belongs to. Blocks: runs git."""
    # Without the digest of local changes: a key that is filled in to record would change it.
    return RecordingId(suite.name, suite.revision_of(task).partition("-")[0], task.id)


def recorded_launch_time(state: Path, suite: Suite, task: Task) -> datetime | None:
    """The launch time that a task's recording fixes, None without a recording. Blocks."""
    path = recording_id(suite, task).path(state / FOLDER)
    if not path.is_file():
        return None
    try:
        with Recording(path) as recording:
            return recording.launch_time
    except RecordingError as error:
        log.warning("a recording cannot be read", extra=fields(why=str(error)))
        return None


def recorded_note(settings: Settings, suite: Suite, task: Task) -> tuple[str, JsonObject] | None:
    """What `tasks --check` tells of a recording of this revision. Blocks. Raises SettingsError."""
    folder = settings.state / FOLDER
    # Running git takes longer than this, and most tasks have none.
    if not revisions(folder, suite.name, task.id):
        return None
    path = recording_id(suite, task).path(folder)
    if not path.is_file():
        return None
    try:
        with Recording(path) as recording:
            summary = recording.summary()
    except RecordingError as error:
        raise SettingsError(str(error)) from None
    members = {"hit_rate": summary.rate, "runnable": summary.runnable}
    return f"recorded: {summary.rate_text}", {"recorded": members}


def no_recording(state: Path, suite: Suite, task: Task) -> str:
    """A sentence that says of which revision a recording is missing, and which there are."""
    revision = recording_id(suite, task).revision
    others = revisions(state / FOLDER, suite.name, task.id)
    found = f"; there are recordings of {', '.join(others)}" if others else ""
    return (
        f"needs a recording of its web for revision {revision} of the suite{found}: play it once with "
        "`--web record`"
    )
