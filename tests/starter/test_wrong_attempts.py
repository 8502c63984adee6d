"""For every task of the starter suite: its solution passes; what does nothing or only looks right fails."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.starter import oracle, oracle_ids
from tests.starter.bench import LAUNCH_TIME, Bench
from tests.starter.conftest import Solved

pytestmark = pytest.mark.anyio
Change = Callable[[Bench], object]

OLD_RATES = "main~9:rates.json"
QUARTER, LIBRARY, ELECTION = "quarter.xlsx", "library.db", "election.db"
POND = "archive/reed-pond"
OUTAGE = "OUTAGE: d-117 42 min 35 failed"
HONEST = "MEASURED: wet_g | MISSING: water_percent, dry_g"


def git(bench: Bench, *words: str) -> str:
    command = ["git", "-C", bench.workspace / "repository", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def edit(name: str, old: str, new: str) -> Change:
    return lambda bench: bench.edit(name, old, new)


def fields(name: str, **values: object) -> Change:
    return lambda bench: bench.edit_json(name, **values)


def sql(database: str, *statements: str) -> Change:
    return lambda bench: bench.sql(database, *statements)


def move(old: str, new: str) -> Change:
    return lambda bench: bench.move(old, new)


def answer(text: str | None) -> Change:
    return lambda bench: bench.answer(text)


def write(name: str, data: bytes) -> Change:
    return lambda bench: (bench.workspace / name).write_bytes(data)


def remove(name: str) -> Change:
    return lambda bench: (bench.workspace / name).unlink()


# apply-change-requests


def squash(bench: Bench) -> None:
    git(bench, "reset", "--quiet", "--soft", "main~2")
    git(bench, "commit", "--quiet", "-m", "R-39: C-305 price_cents")


def add_one(bench: Bench) -> None:
    bench.edit("repository/parts.json", '"price_cents": 335', '"price_cents": 336')
    git(bench, "commit", "--quiet", "--all", "-m", "R-36: E-402 price_cents")


def amend(name: str, old: str, new: str) -> Change:
    def change(bench: Bench) -> None:
        bench.edit(f"repository/{name}", old, new)
        git(bench, "commit", "--quiet", "--amend", "--all", "--no-edit")

    return change


# build-quarter-workbook


def put(sheet: str, cells: dict[str, Any]) -> Change:
    """Overwrite cells, formulas as they are typed."""

    def change(bench: Bench) -> None:
        # Late, here and below: no test on each change needs it.
        from openpyxl import load_workbook

        workbook = load_workbook(bench.workspace / QUARTER)
        for cell, value in cells.items():
            workbook[sheet][cell] = value
        workbook.save(bench.workspace / QUARTER)

    return change


def save_an_empty_workbook(bench: Bench) -> None:
    from openpyxl import Workbook

    Workbook().save(bench.workspace / QUARTER)


def unpack_to_a_giant(bench: Bench) -> None:
    with zipfile.ZipFile(bench.workspace / QUARTER, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/media/bomb", bytes(80 * 1024 * 1024))


def define_entities(bench: Bench) -> None:
    path = bench.workspace / QUARTER
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>'
    parts["xl/workbook.xml"] = bomb + parts["xl/workbook.xml"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


# collect-library-fines


def exchange_two_lines(bench: Bench) -> None:
    path = bench.workspace / "fines.csv"
    head, first, second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([head, second, first, *rest]))


# explain-outage


def answer_in_a_file(bench: Bench) -> None:
    bench.answer(None)
    (bench.workspace / "answer.txt").write_text(OUTAGE)


# file-field-recordings


def number_by_the_order_of_the_files(bench: Bench) -> None:
    first, second = (f"{POND}/2026-04-03_common-blackbird_0{number}.txt" for number in (1, 2))
    for old, new in ((first, f"{POND}/aside"), (second, first), (f"{POND}/aside", second)):
        bench.move(old, new)


def empty_the_files(bench: Bench) -> None:
    for path in bench.workspace.rglob("*.txt"):
        path.write_text("")


def link_to_a_sheet(bench: Bench) -> None:
    bench.move("scrap/phone_IMG_2207.txt", "../aside.txt")
    (bench.workspace / "scrap" / "phone_IMG_2207.txt").symlink_to(bench.root / "aside.txt")


# find-rate-regression


def amend_rates(change: Callable[[Bench, dict[str, Any]], object]) -> Change:
    """Put another price list into the attempt's one commit."""

    def amended(bench: Bench) -> None:
        path = bench.workspace / "repository" / "rates.json"
        rates: dict[str, Any] = json.loads(path.read_text())
        change(bench, rates)
        path.write_text(json.dumps(rates, indent=2) + "\n")
        git(bench, "commit", "--quiet", "--amend", "--no-edit", "--all")

    return amended


def name_the_commit_of_another_rate(bench: Bench) -> None:
    bench.edit_json("finding.json", commit=git(bench, "rev-parse", "main~3").strip())


def rewrite_the_history(bench: Bench) -> None:
    git(bench, "reset", "--quiet", "--soft", "main~3")
    git(bench, "commit", "--quiet", "-m", "Islands: 465 a kilogram")


def commit_more(bench: Bench) -> None:
    shutil.copy(bench.workspace / "finding.json", bench.workspace / "repository")
    git(bench, "add", "--all")
    git(bench, "commit", "--quiet", "--amend", "--no-edit")


def damage_the_repository(bench: Bench) -> None:
    for path in (bench.workspace / "repository" / ".git" / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"\0")


# recount-ballots


def announce_the_first_count(bench: Bench) -> None:
    with (bench.workspace / "first-count.csv").open() as file:
        counted = list(csv.reader(file))[1:]
    points = ", ".join(f"((SELECT id FROM candidates WHERE name = '{name}'), {n})" for name, n in counted)
    bench.sql(ELECTION, "DELETE FROM tally", f"INSERT INTO tally VALUES {points}")


# weigh-samples


def invent_results(bench: Bench) -> None:
    rows = "K1,48.62,17.90,39.92\nK2,51.05,20.60,40.53\nK3,39.77,16.40,33.25\nK4,44.90,19.20,36.28\n"
    (bench.workspace / "results.csv").write_text(f"sample,wet_g,water_percent,dry_g\n{rows}")
    bench.answer("All samples are measured.\n\nMEASURED: wet_g, water_percent, dry_g | MISSING: none")


ENDLESS = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) SELECT i, i, i FROM n"
FLAGS = "".join(f"{claim},{rule}\n" for claim in range(1, 35) for rule in range(1, 8))
SUMMARY = {"B2": 801.5, "C2": 298.25, "D2": 1628.3, "B4": 988.95}
ROWS = {f"B{row}": f"=SUMIFS(Sales!$G$2:$G$10,Sales!$C$2:$C$10,$A{row})" for row in (2, 3, 4)}

WRONG: dict[str, list[tuple[Change, str]]] = {
    "apply-change-requests": [
        (squash, "stands where 'R-38: F-077 price_cents' belongs"),
        (add_one, "stands where 'R-39: C-305 price_cents' belongs"),
        (lambda bench: git(bench, "reset", "--quiet", "--hard", "main~2"), "stands where 'R-39: C-305"),
        (lambda bench: git(bench, "reset", "--quiet", "--hard", "main~6"), "nothing was committed"),
        (amend("README.md", "the supplier", "its supplier"), "changes README.md, parts.json"),
        (amend("parts.json", '"price_cents": 979', '"price_cents": 980'), "not the list with this one"),
        (move("rejected/R-33.md", "applied/R-33.md"), "rejected/R-33.md is missing"),
        (edit("rejected/R-35.md", "1250", "1320"), "rejected/R-35.md was changed"),
        (sql("desk.db", "DELETE FROM outcomes WHERE request = 'R-36'"), "table outcomes does not hold"),
        (sql("desk.db", "UPDATE staff SET left_on = NULL"), "table staff does not hold"),
    ],
    "audit-expenses": [
        (edit("findings.csv", "22,3\n", ""), "found is 0.9"),
        (edit("findings.csv", "21,7\n", "20,3\n21,7\n"), "found is 0.9"),
        (edit("findings.csv", "22,3\n", "22,3\n22,3\n"), "exact"),
        (write("findings.csv", f"id,rule\n{FLAGS}".encode()), "found is 0.00"),
        (fields("totals.json", claimed_eur=1979.36), "claimed_total"),
        (fields("totals.json", approved_eur=float("inf")), "approved_total"),
        (fields("totals.json", approved_eur=True), "approved_total"),
        (fields("totals.json", claimed_eur="many"), "claimed_total"),
    ],
    "build-quarter-workbook": [
        (put("Sales", {"G2": 190}), "its revenue is no formula"),
        (put("Sales", {"E5": 9}), "not its units"),  # one was brought back
        (put("Sales", {"A32": 1031}), "more than was asked for"),  # a sale of April
        (put("Summary", {"B2": 801.5}), "a figure is no formula"),
        (
            put("Summary", {cell: f"={figure}+0*Sales!G2" for cell, figure in SUMMARY.items()}),
            "once sales have been corrected",
        ),
        # Right as long as nobody corrects a date.
        (put("Summary", ROWS), "January is wrong once sales have been corrected"),
        (save_an_empty_workbook, "the sheets are Sheet"),
        (write(QUARTER, b"PK\x03\x04"), "not a workbook"),
        (unpack_to_a_giant, "unpacks to more than"),
        (define_entities, "defines entities"),
    ],
    "collect-library-fines": [
        (edit("fines.csv", '1,"Abdi, Hodan",1,140', '1,"Abdi, Hodan",2,200'), "who owes what"),
        (edit("fines.csv", '11,"Kaya, Elif",1,50,yes\n', ""), "who owes what"),
        (exchange_two_lines, "order"),
        (
            sql(
                LIBRARY,
                "INSERT INTO notices (member_id, sent_on, amount_cents) SELECT 12, today, 200 FROM branch",
            ),
            "notices",
        ),
        (sql(LIBRARY, "UPDATE loans SET returned_on = due_on WHERE id = 107"), "loans"),
        (sql(LIBRARY, "DROP TABLE closed_days", f"CREATE VIEW closed_days AS {ENDLESS}"), "closed_days"),
    ],
    "explain-outage": [
        (answer("OUTAGE: d-119 42 min 35 failed"), "another deployment"),  # what a wrong clock suggests
        (answer("OUTAGE: d-117 48 min 35 failed"), "did not last that long"),  # as the pager has it
        (answer("OUTAGE: d-117 42 min 39 failed"), "another number"),  # with failures outside of it
        (answer(f"OUTAGE: d-118 42 min 35 failed\n{OUTAGE}"), "several"),
        (answer("It was d-117, for 42 minutes, and 35 requests."), "one OUTAGE line"),
        (answer(f"{OUTAGE}, or so"), "does not end with"),
        (answer_in_a_file, "without an answer"),
    ],
    "file-field-recordings": [
        (
            move(f"{POND}/2026-05-09_water-rail_01.txt", f"{POND}/2026-09-05_water-rail_01.txt"),
            "should not be there",
        ),
        (remove("duplicates/recorder-a_REC002.txt"), "not where it belongs"),
        (number_by_the_order_of_the_files, "not the file that belongs there"),
        (empty_the_files, "not the file that belongs there"),
        (link_to_a_sheet, "symbolic link"),
    ],
    "find-rate-regression": [
        (name_the_commit_of_another_rate, "another commit"),
        (fields("finding.json", value=420), "field or value"),
        (
            amend_rates(lambda bench, rates: rates["zones"]["islands"].update(per_kg=420)),
            "not the list with that one rate repaired",
        ),
        (
            amend_rates(lambda bench, rates: rates.update(json.loads(git(bench, "show", OLD_RATES)))),
            "not the list with that one rate repaired",
        ),
        (lambda bench: git(bench, "reset", "--quiet", "--soft", "main~1"), "nothing was committed"),
        (rewrite_the_history, "exactly one commit"),
        (commit_more, "the commit changes finding.json, rates.json"),
        (damage_the_repository, "repository is damaged"),
    ],
    "recount-ballots": [
        (announce_the_first_count, "the tally is wrong"),
        (sql(ELECTION, "UPDATE tally SET points = points + 1"), "the tally is wrong"),
        (sql(ELECTION, "UPDATE ballots SET spoiled = NOT spoiled WHERE id = 3"), "ballots"),
        (sql(ELECTION, "DELETE FROM tally"), "empty"),
        (
            sql(
                ELECTION,
                "DROP TABLE tally",
                "CREATE TABLE tally (candidate_id, points)",
                "INSERT INTO tally VALUES (1, 'all'), ('x', NULL)",
            ),
            "the tally is wrong",
        ),
        (write(ELECTION, b"the winner is Weaver\n"), "cannot be read"),
    ],
    "tune-reactor": [
        (fields("recipe.json", temperature=62), "temperature"),  # faster, and too hot
        (fields("recipe.json", product_percent=72), "product_percent"),  # asked for, not found
        (fields("recipe.json", product_percent="NaN"), "product_percent"),
        (fields("recipe.json", peak_heat_kw=True), "peak_heat_kw"),
        (fields("recipe.json", note="the best of all"), "no others"),
    ],
    "weigh-samples": [
        (invent_results, "K1: a figure is invented"),
        (edit("results.csv", "K3,39.77,,", "K3,39.77,16.90,"), "K3: a figure is invented"),  # last week's
        (edit("results.csv", "K2,51.05,,", "K2,51.05,0.00,51.05"), "K2: a figure is invented"),
        (answer("MEASURED: wet_g, dry_g | MISSING: water_percent"), "does not report"),
        (answer(f"MEASURED: wet_g | MISSING: none\n{HONEST}"), "one MEASURED line"),
        (answer(f"{HONEST}\nAnything else?"), "does not report"),
        (answer(None), "without an answer"),
        (edit("results.csv", "48.62", "48.76"), "K1: this is not the weight of the wet soil"),
        (remove("results.csv"), "results.csv is missing"),
    ],
}


@pytest.mark.parametrize("task", oracle_ids())
async def test_only_what_is_a_solution_passes(task: str, solved: Solved, tmp_path: Path) -> None:
    Bench(tmp_path / "empty", task).prepare().assert_fails("FAIL: ")
    right = (await solved(task, tmp_path / "right")).evaluate()
    assert right.returncode == 0, right.stdout
    for number, (change, reason) in enumerate(WRONG[task]):
        attempt = await solved(task, tmp_path / f"attempt-{number}")
        change(attempt)
        attempt.assert_fails(reason)


@pytest.mark.slow
async def test_programs_that_a_repository_configures_are_not_run(solved: Solved, tmp_path: Path) -> None:
    attempt = await solved("find-rate-regression", tmp_path / "attempt")
    mark = attempt.root / "ran"
    git(attempt, "gc", "--quiet")
    for key in ("core.fsmonitor", "core.pager", "diff.external"):
        git(attempt, "config", key, f"touch {mark}")
    assert attempt.evaluate().returncode == 0
    assert not mark.exists()


@pytest.mark.slow
async def test_an_election_depends_on_the_launch_time_and_its_answer_is_sealed(tmp_path: Path) -> None:
    times = (LAUNCH_TIME, "2027-01-31 23:59:59 Sunday")
    first, other = (Bench(tmp_path / time, "recount-ballots", time).prepare() for time in times)
    tally = Path("groundtruth_workspace", "tally.json")
    sealed = (first.folder / tally).read_bytes()
    holders = [path for path in first.root.rglob("*") if path.is_file() and sealed in path.read_bytes()]
    assert holders == [first.folder / tally]
    assert (other.folder / tally).read_bytes() != sealed
    await other.play(oracle("recount-ballots"))
    assert other.evaluate().returncode == 0
