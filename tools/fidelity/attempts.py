"""Scripted attempts at the tasks of Toolathlon that need nothing but their image, with the tasks' own tools.

"right" is correct, and "wrong" is the same with a mistake. What a correct attempt writes comes
from the ground truth of the checkout that is played, because these attempts test graders and not agents.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tests.probe.clients import Player
from tools.fidelity.calls import WORKSPACE, Solution, call, run_python, write_texts
from tools.fidelity.files import TRUTH, Files, FilesOf, archive, copied, same, unpacked, with_mistake

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MAX_COMMAND = 1_900
"""Characters of one command of upstream's terminal, whose limit is 2,048."""
_DISHES = ("瘦肉土豆片", "茄子肉煎饼", "冬瓜酿肉")
"""They use more than half of the ingredients that the task has in stock."""
_NOTE = """# Symbol tables

## Definition and differences

A **symbol table** maps names to their meaning. In functional style, insert makes a new table and leaves the
old one as it is; in imperative style, insert changes the table, and leaving a scope undoes it. Imperative
tables, compared to functional ones, need less memory, because nothing is copied: for example a lookup in a
hash table.

## Code of the lecture, with explanations

```
{code}
```

- `insert(table, key, binding)` adds a binding, `lookup(table, key)` finds it.

## Homework

`HW.pdf`: each exercise asks for the type of an expression, and its answer follows from the bindings in scope.
"""


def by_python(files_of: FilesOf) -> Solution:
    """Write the files of a correct attempt with the task's tool for Python."""

    async def solution(player: Player, task: Path, attempt: str) -> None:
        files = _files(files_of, task, attempt)
        packed = base64.b64encode(archive(files)).decode()
        removed = [name for name, content in files.items() if content is None]
        await run_python(
            player,
            f"import base64, io, os, tarfile\n"
            f"packed = io.BytesIO(base64.b64decode('{packed}'))\n"
            f"tarfile.open(fileobj=packed).extractall('.', filter='data')\n"
            f"for name in {removed!r}: os.remove(name)\n",
        )

    return solution


def by_filesystem(files_of: FilesOf) -> Solution:
    """Write the texts of a correct attempt with the server `filesystem`."""

    async def solution(player: Player, task: Path, attempt: str) -> None:
        await write_texts(player, _files(files_of, task, attempt))

    return solution


def _files(files_of: FilesOf, task: Path, attempt: str) -> Files:
    files = files_of(task)
    return with_mistake(files) if attempt == "wrong" else files


async def arrange_workspace(player: Player, task: Path, attempt: str) -> None:
    """Make the folders and files that the evaluator names: a checkout may lack the files to be moved."""
    namespace: dict[str, Mapping[str, set[str]]] = {}
    source = (task / "evaluation/check_local.py").read_text()
    exec(re.search(r"^GT_STRUCTURE = \{.*?^\}", source, re.MULTILINE | re.DOTALL)[0], namespace)  # type: ignore[index]
    expected = namespace["GT_STRUCTURE"]
    found = await call(player, "filesystem__list_directory", path=WORKSPACE)
    names = [line.partition("] ")[2] for line in found.splitlines() if line.startswith("[")]
    folders, files = sorted(expected["directories"]), sorted(expected["files"])
    if attempt == "wrong":
        files.pop()
    await _run_command(player, "rm -rf", [name for name in names if name != ".pdf_tools_tempfiles"])
    await _run_command(player, "mkdir -p", folders)
    await _run_command(player, "touch", files)


async def _run_command(player: Player, command: str, names: list[str]) -> None:
    """Run the command with these names, in as many runs as the limit of a command's length takes."""
    line = command
    for name in [*names, None]:
        if name is None or len(line) + len(name) > _MAX_COMMAND:
            if line != command:
                await call(player, "terminal__run_command", command=line)
            line = command
        line += f" '{name}'"


async def cook(player: Player, task: Path, attempt: str) -> None:
    """Choose three dishes, and buy everything that they take; without the list's last entries if "wrong"."""
    needed: dict[str, str] = {}
    for dish in _DISHES:
        recipe = await call(player, "howtocook__mcp_howtocook_getRecipeById", query=dish)
        assert dish in recipe, recipe
        text = (task / TRUTH / "dishes" / f"{dish}.md").read_text()
        for section in re.findall(r"## (?:必备原料和工具|计算)(.*?)(?=\n## )", text, re.DOTALL):
            for line in re.findall(r"^[-*] +(.+)$", section, re.MULTILINE):
                name, _, quantity = re.sub(r"[（(].*?[）)]", "", line).replace("=", " ").partition(" ")
                needed[name.strip("：:")] = quantity.strip() or "1份"
    if attempt == "wrong":
        needed = dict(list(needed.items())[:1])
    stored = io.StringIO()
    csv.writer(stored).writerows([("Name", "Quantity"), *needed.items()])
    cuisine = {"recommended_dishes": [{"name": dish} for dish in _DISHES]}
    shopping, dishes = stored.getvalue().encode(), json.dumps(cuisine, ensure_ascii=False).encode()
    await write_texts(player, {"cuisine.json": dishes, "shopping.csv": shopping})


async def sort_homework(player: Player, task: Path, attempt: str) -> None:
    """Rename the files of one course and remove all others; one has another number if "wrong"."""
    expected = json.loads((task / TRUTH / "expected_mapping.json").read_text())["expected_students"]
    moves = {
        student["original_file"]: f"os_hw3/{student['target_folder']}/{student['expected_renamed']}"
        for student in expected.values()
    }
    if attempt == "wrong":
        first = next(iter(moves))
        moves[first] = re.sub(r"\d{4}(?=-OS)", "0000", moves[first])
    await run_python(
        player,
        f"import os\n"
        f"moves = {moves!r}\n"
        f"found = {{name: os.path.join(at, name) for at, _, names in os.walk('.') for name in names}}\n"
        f"for name, goal in moves.items():\n"
        f"    os.makedirs(os.path.dirname(goal), exist_ok=True)\n"
        f"    os.rename(found.pop(name), goal)\n"
        f"for name, path in found.items():\n"
        f"    if name.endswith(('.c', '.rs', '.py')): os.remove(path)\n",
    )


async def write_reports(player: Player, task: Path, attempt: str) -> None:
    """Write each candidate's report with the server `word`; recommend somebody else if "wrong"."""
    for report in sorted((task / TRUTH).glob("*.docx")):
        with zipfile.ZipFile(report) as archived:
            body = ET.fromstring(archived.read("word/document.xml"))[0]
        text = " ".join(filter(None, (_text(paragraph) for paragraph in body.iterfind(f"{_WORD}p"))))
        rows = [list(row.iterfind(f"{_WORD}tc")) for row in body.iterfind(f"{_WORD}tbl/{_WORD}tr")]
        name = f"{WORKSPACE}/{report.name}"
        await call(player, "word__create_document", filename=name)
        await call(player, "word__add_paragraph", filename=name, text=text)
        data = [[_text(cell) for cell in row] for row in rows]
        await call(player, "word__add_table", filename=name, rows=len(rows), cols=len(rows[0]), data=data)
        for row_index, row in enumerate(rows):
            for column, cell in enumerate(row):
                shade = cell.find(f"{_WORD}tcPr/{_WORD}shd")
                if shade is not None:
                    await call(
                        player,
                        "word__set_table_cell_shading",
                        filename=name,
                        table_index=0,
                        row_index=row_index,
                        col_index=column,
                        fill_color=shade.get(f"{_WORD}fill"),
                    )
    best = (task / TRUTH / "strict_hiring_groundtruth.txt").read_text().partition("✅ ")[2].split("\n")[0]
    await write_texts(player, {"recommend.txt": (best if attempt == "right" else "Anna Taylor").encode()})


def _text(element: ET.Element) -> str:
    return "".join(text.text or "" for text in element.iter(f"{_WORD}t"))


async def take_notes(player: Player, task: Path, attempt: str) -> None:
    """Write a note with the lecture's text as the server `pptx` returns it; without its code if "wrong"."""
    opened = json.loads(await call(player, "pptx__open_presentation", file_path=f"{WORKSPACE}/Compile.pptx"))
    lecture = await call(player, "pptx__extract_presentation_text", presentation_id=opened["presentation_id"])
    code = "\n".join(_strings(json.loads(lecture))) if attempt == "right" else ""
    await write_texts(player, {"NOTE.md": _NOTE.replace("{code}", code).encode()})


def _strings(value: object) -> list[str]:
    """All strings in a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    parts = cast("list[object]", value) if isinstance(value, list) else []
    return [string for part in parts for string in _strings(part)]


AS_IS: Mapping[str, Solution] = {
    "arrange-workspace": arrange_workspace,
    "cooking-guidance": cook,
    "courses-ta-hws": sort_homework,
    "detect-revised-terms": by_filesystem(same("revised_terms.csv")),
    "dietary-health": by_filesystem(same("analysis.md")),
    "excel-data-transformation": by_python(same("Processed.xlsx")),
    "excel-market-research": by_python(same("segment_growth_rates.xlsx")),
    "imagenet": by_filesystem(same("survey.tex")),
    "interview-report": write_reports,
    "paper-checker": by_python(unpacked("files.tar.gz", ".tex", ".bib")),
    "ppt-analysis": take_notes,
    "privacy-desensitization": by_python(unpacked("gt_files.tar.gz")),
    "reimbursement-form-filler": by_python(same("department_expenses.xlsx")),
    "sales-accounting": by_python(copied(**{"Account_Book.xlsx": "Account_Book_Complete.xlsx"})),
    "university-course-selection": by_python(
        same(*(f"en_op{number}.xlsx" for number in range(1, 5)), without=("reference_format.xlsx",))
    ),
}
"""Tasks that need nothing but their image."""
