"""Scripted attempts at Toolathlon's four mail tasks, with nothing but the tasks' own tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.probe.clients import Player
from tools.fidelity.calls import WORKSPACE, Solution, call


async def send(player: Player, to: str, subject: str, body: str, *attachments: str) -> None:
    options = {"attachments": [*attachments]} if attachments else {}
    await call(player, "emails__send_email", to=to, subject=subject, body=body, **options)


async def apply_phd_email(player: Player, task: Path, attempt: str) -> None:
    """Sort the flat folder as the professor's mail says, merge the awards, send it as a ZIP file."""
    mails = await call(player, "emails__get_emails")
    assert "PhD Application" in mails, mails
    graph = await call(player, "memory__read_graph")
    assert "2201210606" in graph, graph
    flat, name = "Application_Materials_flat", "Application_Materials_MaryCastillo_2201210606"
    placed = {
        "ID_Card.pdf": "01_Personal_Information/ID_Card.pdf",
        "Photo.jpg": "01_Personal_Information/Photo.jpg",
        "CV.pdf": "01_Personal_Information/Resume.pdf",
        "Enrollment_Certificate.pdf": "02_Academic_Materials/Enrollment_Certificate.pdf",
        "Transcript.pdf": "02_Academic_Materials/Transcript.pdf",
        "Recommendation_Letter_1.pdf": "03_Recommendation_Letters/Recommendation_Letter_Alex-1.pdf",
        "Recommendation_Letter_2.pdf": "03_Recommendation_Letters/Recommendation_Letter_Lily-2.pdf",
        "Portfolio.pdf": "04_Supplementary_Materials/Portfolio.pdf",
        "Project_Report.pdf": "04_Supplementary_Materials/Project_Report.pdf",
    }
    if attempt == "wrong":
        placed.pop("Portfolio.pdf")
    awards = f"{name}/02_Academic_Materials/Awards_Certificates"
    folders = [awards, *(f"{name}/{goal.rpartition('/')[0]}" for goal in placed.values())]
    await call(player, "terminal__run_command", command=f"mkdir -p {' '.join(dict.fromkeys(folders))}")
    copies = " && ".join(f"cp {flat}/{file} {name}/{goal}" for file, goal in placed.items())
    await call(player, "terminal__run_command", command=copies)
    certificates = (
        "Outstanding_Student_Award_2021.pdf",
        "Research_Competition_First_Place_2022.pdf",
        "Academic_Excellence_Award_2023.pdf",
    )
    await call(
        player,
        "pdf-tools__merge_pdfs",
        pdf_paths=[f"{flat}/{certificate}" for certificate in certificates],
        output_path=f"{awards}/All_Awards_Certificates.pdf",
    )
    await call(player, "terminal__run_command", command=f"zip -r {name}.zip {name}")
    await send(
        player,
        "myersj@mcp.com",
        "PhD Application Materials Submission (Student ID: 2201210606)",
        "Dear admissions team, please find my materials attached. Mary Castillo",
        f"{WORKSPACE}/{name}.zip",
    )


async def course_assistant(player: Player, task: Path, attempt: str) -> None:
    """Remind two students whose presentation is not in the mailbox and one whose assignment 7 is missing."""
    mails = await call(player, "emails__get_emails", page_size=50)
    assert "nlp-presentation" in mails, mails
    late = {
        "smorgan@mcp.com": ("Steven Morgan", "2000016613"),
        "calvarez@mcp.com": ("Carolyn Alvarez", "2000016630"),
        "michelle_brooks26@mcp.com": ("Michelle Brooks", "2000016606"),
    }
    presented = [number for _, number in late.values() if f"nlp-presentation-{number}" in mails]
    assert presented == ["2000016606"], mails
    if attempt == "wrong":
        late["smorgan@mcp.com"] = ("Steven Morgan", "2000016606")
    for address, (student, number) in late.items():
        body = f"Dear {student} (student ID {number}), your final presentation has not arrived."
        await send(player, address, "nlp-course-emergency", body)


async def meeting_assign(player: Player, task: Path, attempt: str) -> None:
    """Read the poll at localhost:30137 and send the slot that suits all."""
    page = await call(player, "fetch__fetch_html", url="http://localhost:30137")
    assert "When2meet" in page, page[:1000]
    slot = "Tuesday 2:00 PM to 4:00 PM" if attempt == "right" else "Friday 9:00 AM to 11:00 AM"
    people = "jinghanz, junteng, Junxian, shiqi, Ting Wu, Wei Liu, Weihao Zeng, YANG Cheng, 童雨轩, 黄裕振"
    letter = await call(player, "filesystem__read_file", path="format.md")
    parts = letter.split("{PLEASE_FILL_IT}")
    body = f"{parts[0]}{slot} every week{parts[1]}{people}{parts[2]}"
    await send(player, "jjones@mcp.com", "HKUST NLP Group Meeting", body)


async def git_bug_hunt(player: Player, task: Path, attempt: str) -> None:
    """Find the first commit with the variable, and write to its author."""
    log = await call(
        player,
        "terminal__run_command",
        command="git -C LUFFY log --reverse -S remove_caching_layer --format=%H%x09%an%x09%ae%x09%B%x00",
    )
    first = log.split("\x00")[0].partition("STDOUT:")[2] or log.split("\x00")[0]
    commit, author, address, message = first.strip().split("\t", 3)
    template = await call(player, "filesystem__read_file", path="template.txt")
    body = template.replace("{Author's Name}", author).replace("{Full Commit Message}", message.strip())
    body = body.replace("{Commit Hash}", commit if attempt == "right" else commit[::-1])
    await send(player, address, "[URGENT] Performance Issue Investigation Regarding Your Commit", body)


MAIL: Mapping[str, Solution] = {
    "apply-phd-email": apply_phd_email,
    "course-assistant": course_assistant,
    "meeting-assign": meeting_assign,
    "git-bug-hunt": git_bug_hunt,
}
"""Tasks that need a mail server."""
