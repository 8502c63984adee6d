"""Creates the repository, the database and the requests, and records what is right for the evaluator."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from utils.preparation import Version, create_repository, episode

from .desk import PARTS, README, REQUESTS, RIGHTS, STAFF

GROUNDTRUTH = Path(__file__).resolve().parents[1] / "groundtruth_workspace"

TABLES = """
CREATE TABLE staff (name TEXT PRIMARY KEY, role TEXT NOT NULL, left_on TEXT);
CREATE TABLE rights (role TEXT NOT NULL, field TEXT NOT NULL, max_percent INTEGER, PRIMARY KEY (role, field));
CREATE TABLE outcomes (
    request TEXT PRIMARY KEY, outcome TEXT NOT NULL CHECK (outcome IN ('applied', 'rejected'))
);
"""


def main() -> None:
    workspace = episode().workspace
    files = {"README.md": README, "parts.json": listing(PARTS)}
    version = Version("2026-05-01", "Mirela Stan", "Parts list of May", files)
    (base,) = create_repository(
        workspace / "repository", [version], user="Parts desk", email="desk@parts.example"
    )
    connection = sqlite3.connect(workspace / "desk.db")
    with connection:
        connection.executescript(TABLES)
        connection.executemany("INSERT INTO staff VALUES (?, ?, ?)", STAFF)
        connection.executemany("INSERT INTO rights VALUES (?, ?, ?)", RIGHTS)
    connection.close()
    (workspace / "requests").mkdir()
    for request in REQUESTS:
        (workspace / "requests" / f"{request.id}.md").write_text(request.text, "utf-8")
    (GROUNDTRUTH / "expected.json").write_text(json.dumps(expected(base)))


def expected(base: str) -> dict[str, Any]:
    """The commits in their order, each with the list after it, and the rest of the workspace."""
    parts: dict[str, Any] = json.loads(json.dumps(PARTS))
    commits: list[dict[str, Any]] = []
    for request in sorted(REQUESTS, key=lambda request: request.signed_at):
        if request.is_applied:
            parts[request.part][request.field] = request.new
            subject = f"{request.id}: {request.part} {request.field}"
            commits.append({"subject": subject, "parts": json.loads(json.dumps(parts))})
    outcomes = {request.id: "applied" if request.is_applied else "rejected" for request in REQUESTS}
    files = {f"{outcomes[request.id]}/{request.id}.md": request.text for request in REQUESTS}
    tables = {"staff": STAFF, "rights": RIGHTS, "outcomes": sorted(outcomes.items())}
    return {"base": base, "commits": commits, "files": files, "tables": tables}


def listing(parts: dict[str, dict[str, Any]]) -> str:
    """The list as JSON, a line for each part."""
    lines = (f"  {json.dumps(name)}: {json.dumps(part, ensure_ascii=False)}" for name, part in parts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
