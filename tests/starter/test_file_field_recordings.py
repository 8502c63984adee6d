"""file-field-recordings: attempts that look like a solution but are wrong."""

from __future__ import annotations

import pytest

from tests.starter.bench import Bench

pytestmark = pytest.mark.anyio
TASK = "file-field-recordings"
POND = "archive/reed-pond"


async def test_reading_the_guests_dates_the_wrong_way_round_fails(right: Bench) -> None:
    right.move(f"{POND}/2026-05-09_water-rail_01.txt", f"{POND}/2026-09-05_water-rail_01.txt")
    right.assert_fails("should not be there")


async def test_leaving_a_sheet_in_the_inbox_fails(right: Bench) -> None:
    right.move("archive/muehlbach/2026-04-11_kingfisher_02.txt", "inbox/recorder-a/REC001.txt")
    right.assert_fails("should not be there")


async def test_throwing_a_duplicate_away_fails(right: Bench) -> None:
    (right.workspace / "duplicates" / "recorder-a_REC002.txt").unlink()
    right.assert_fails("not where it belongs")


async def test_numbering_by_the_order_of_the_files_fails(right: Bench) -> None:
    right.move(f"{POND}/2026-04-03_common-blackbird_01.txt", f"{POND}/aside")
    right.move(f"{POND}/2026-04-03_common-blackbird_02.txt", f"{POND}/2026-04-03_common-blackbird_01.txt")
    right.move(f"{POND}/aside", f"{POND}/2026-04-03_common-blackbird_02.txt")
    right.assert_fails("not the file that belongs there")


async def test_the_right_names_on_empty_files_fail(right: Bench) -> None:
    for path in right.workspace.rglob("*.txt"):
        path.write_text("")
    right.assert_fails("not the file that belongs there")


async def test_a_link_in_place_of_a_sheet_fails(right: Bench) -> None:
    sheet = right.workspace / "scrap" / "phone_IMG_2207.txt"
    right.move("scrap/phone_IMG_2207.txt", "../aside.txt")
    sheet.symlink_to(right.root / "aside.txt")
    right.assert_fails("symbolic link")


async def test_empty_folders_do_not_matter(right: Bench) -> None:
    (right.workspace / "inbox" / "phone").mkdir(parents=True, exist_ok=True)
    (right.workspace / "later").mkdir()
    assert right.evaluate().exit_code == 0
