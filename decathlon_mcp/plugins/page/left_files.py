"""The files that an agent left: their list, one of them as text or as an image, and any to download.

Their names and contents are the agent's. A file is asked for by its number in the list. HTML is shown as
text, and what is downloaded has a type by which no browser shows it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from decathlon_mcp.archives.reading import BrokenArchiveError
from decathlon_mcp.plugins.history.workspaces import LeftFile
from decathlon_mcp.plugins.page.access import SANDBOXED
from decathlon_mcp.plugins.page.call_entries import IMAGE_BEGINNINGS, MAX_IMAGE_BYTES, image_url
from decathlon_mcp.plugins.page.episode_pages import find_episode
from decathlon_mcp.plugins.page.rendering import marked
from decathlon_mcp.plugins.page.site import Visit

MAX_TEXT_BYTES = 64 << 10
"""Of a longer text the beginning is shown."""
MAX_NAME_CHARACTERS = 100
_BEGINNINGS = tuple(chain.from_iterable(IMAGE_BEGINNINGS.values()))
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file with its beginning as text, or as an image (a data URL); neither if it is something else."""

    file: LeftFile
    text: str | None = None
    image: str = ""


def files(visit: Visit) -> Response:
    """`/e/{id}/files`, with `?show=N` one of them above the list."""
    details = find_episode(visit)
    workspace = visit.history.workspace(details.summary.public_id)
    if workspace is None:
        raise HTTPException(
            404, "The files of this episode were not kept: `serve --keep workspace` keeps them."
        )
    number = visit.query("show")
    shown = None
    if number:
        shown = _shown(*_find(visit, details.summary.public_id, visit.number("show", -1)))
    return visit.render("files.html", episode=details.summary, workspace=workspace, shown=shown)


def download(visit: Visit) -> Response:
    """`/e/{id}/files/{number}`: a file as it is, to keep."""
    details = find_episode(visit)
    file, content = _find(visit, details.summary.public_id, visit.path["number"])
    name = marked(file.name.rpartition("/")[2])[:MAX_NAME_CHARACTERS]
    encoded = quote(name, safe="")
    plain = _NOT_PLAIN.sub("_", name).lstrip(".") or "file"
    try:
        # A damaged archive is noticed before the headers are sent, or else ends the connection.
        first = next(content, b"")
    except BrokenArchiveError as error:
        raise HTTPException(500, f"The kept archive is damaged: {error}.") from None
    return StreamingResponse(
        chain((first,), content),
        media_type="application/octet-stream",
        headers={
            "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}",
            "content-length": str(file.size_bytes),
            "content-security-policy": SANDBOXED,
        },
    )


def _find(visit: Visit, public_id: str, number: int) -> tuple[LeftFile, Iterator[bytes]]:
    found = visit.history.left_file(public_id, number)
    if found is None:
        raise HTTPException(404, "There is no such file.")
    return found


def _shown(file: LeftFile, content: Iterator[bytes]) -> ShownFile:
    data = bytearray()
    limit = MAX_IMAGE_BYTES if file.size_bytes <= MAX_IMAGE_BYTES else MAX_TEXT_BYTES
    try:
        for chunk in content:
            data += chunk
            if len(data) >= limit:
                break
    except BrokenArchiveError as error:
        raise HTTPException(500, f"The kept archive is damaged: {error}.") from None
    if file.size_bytes <= MAX_IMAGE_BYTES and data.startswith(_BEGINNINGS):
        encoded = b64encode(data).decode()
        image = next(filter(None, (image_url(encoded, media_type) for media_type in IMAGE_BEGINNINGS)), "")
        return ShownFile(file, image=image)
    beginning = bytes(data[:MAX_TEXT_BYTES])
    # A cut may be inside of a character.
    text = beginning.decode("utf-8", "ignore" if len(beginning) < file.size_bytes else "replace")
    is_text = b"\0" not in beginning and text.count("\ufffd") <= len(text) // 100
    return ShownFile(file, text if is_text else None)
