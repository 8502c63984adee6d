"""Files that an agent left, on the page: what an archive of its own making can do there, which is nothing."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections.abc import AsyncGenerator, Sequence
from html import unescape
from pathlib import Path

import httpx2
import pytest

from decathlon_mcp.plugins.history import workspaces
from decathlon_mcp.plugins.history.workspaces import KEPT_WORKSPACE
from decathlon_mcp.types import public_id
from tests.history.stored_episodes import Folder
from tests.page.sites import KEY, browser, page_over, signed_in
from tests.page.test_hostile import HTML_IMAGE, PNG, Shape

pytestmark = pytest.mark.anyio

HANDLE = "1" * 48


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def keep(state: Path, files: Sequence[tuple[str, bytes] | tarfile.TarInfo]) -> Path:
    """The archive of an episode, as it is kept."""
    kept = state / "episodes" / HANDLE / KEPT_WORKSPACE
    with tarfile.open(kept, "w:gz", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for each in files:
            info = member(each[0]) if isinstance(each, tuple) else each
            content = each[1] if isinstance(each, tuple) else b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return kept


@pytest.fixture
def state(state: Path) -> Path:
    with Folder(state) as folder:
        folder.add(HANDLE)
    return state


@pytest.fixture
def path(state: Path) -> str:
    """Of the episode's page."""
    return f"/e/{public_id(HANDLE)}"


@pytest.fixture
async def person(state: Path) -> AsyncGenerator[httpx2.AsyncClient]:
    async with signed_in(state) as client:
        yield client


async def test_files_are_listed_shown_and_downloaded(
    state: Path, person: httpx2.AsyncClient, path: str
) -> None:
    assert (await person.get(f"{path}/files")).status_code == 404
    assert "Files that it left" not in (await person.get(path)).text
    keep(
        state,
        [member("."), member("./out", tarfile.DIRTYPE), ("./out/report.md", b"# Sum\n42"), ("a.png", PNG)],
    )
    assert f'href="{path}/files">Files that it left</a>' in (await person.get(path)).text
    page = (await person.get(f"{path}/files")).text
    assert re.findall(r"<code>([^<]*)</code>", page) == ["a.png", "out/", "out/report.md"]
    assert (
        '<pre class="words" tabindex="0"># Sum\n42</pre>' in (await person.get(f"{path}/files?show=1")).text
    )
    assert '<img src="data:image/png;base64,' in (await person.get(f"{path}/files?show=2")).text
    response = await person.get(f"{path}/files/1")
    assert response.content == b"# Sum\n42"
    assert response.headers["content-disposition"].startswith('attachment; filename="report.md"')


async def test_only_those_who_may_see_the_episode_get_its_files(state: Path, path: str) -> None:
    keep(state, [("diary.txt", b"dear diary")])
    async with browser(page_over(state)) as stranger:
        for each in (f"{path}/files", f"{path}/files?show=0", f"{path}/files/0"):
            response = await stranger.get(each)
            assert response.status_code == 401
            assert "diary" not in response.text


NAMES = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "<script>alert(1)</script>.html",
    '" onmouseover="alert(1)',
    "a\nSet-Cookie: x=1\r\n\r\n<html>",
    'x"; filename="evil.html',
    "safe\u202etxt.exe",
    "\udcff\udc80",
    "x" * 2_000,
    "%2e%2e",
    "日本語.txt",
)


async def test_a_name_is_only_text(state: Path, person: httpx2.AsyncClient, path: str) -> None:
    pages = (f"{path}/files", f"{path}/files?show=0")
    keep(state, [("benign", b"content")])
    benign = [Shape((await person.get(page)).text).elements for page in pages]
    for name in NAMES:
        keep(state, [(name, b"content")])
        for page, elements in zip(pages, benign, strict=True):
            response = await person.get(page)
            assert response.status_code == 200
            assert Shape(response.text).elements == elements
            assert not re.search("[\x00-\x08\x0b-\x1f\u202e\udc00-\udfff]", response.text)
        await assert_downloaded_as_a_file(person, f"{path}/files/0")


async def assert_downloaded_as_a_file(person: httpx2.AsyncClient, address: str) -> None:
    response = await person.get(address)
    assert response.content == b"content"
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    disposition = response.headers["content-disposition"]
    assert re.fullmatch(
        r"attachment; filename=\"[A-Za-z0-9_-][A-Za-z0-9._-]*\"; filename\*=UTF-8''[A-Za-z0-9._~%-]*",
        disposition,
    )


async def test_no_address_leads_out_of_the_archive(
    state: Path, person: httpx2.AsyncClient, path: str
) -> None:
    keep(state, [("a", b"a")])
    for each in (
        "1",
        "-1",
        "%2e%2e",
        "../trajectory.jsonl",
        "..%2f..%2fpage-key",
        "9" * 400,
        "a",
        "0x0",
    ):
        for address in (f"{path}/files/{each}", f"{path}/files?show={each}"):
            response = await person.get(address)
            assert response.status_code in (303, 400, 404), address
            assert KEY not in response.text


async def test_links_devices_and_folders_have_no_content(
    state: Path, person: httpx2.AsyncClient, path: str
) -> None:
    (state / "outside").write_text("not the agent's")
    members = [
        member("link", tarfile.SYMTYPE, str(state / "outside")),
        member("hard", tarfile.LNKTYPE, "../../../outside"),
        member("device", tarfile.CHRTYPE),
        member("fifo", tarfile.FIFOTYPE),
        member("folder", tarfile.DIRTYPE),
    ]
    keep(state, members)
    page = (await person.get(f"{path}/files")).text
    assert "Download" not in page
    for number in range(len(members)):
        for address in (f"{path}/files/{number}", f"{path}/files?show={number}"):
            response = await person.get(address)
            assert response.status_code == 404
            assert "not the agent" not in response.text


async def test_an_archive_that_is_a_link_is_not_read(
    state: Path, person: httpx2.AsyncClient, path: str
) -> None:
    kept = keep(state, [("a", b"a")])
    kept.rename(state / "elsewhere")
    kept.symlink_to(state / "elsewhere")
    for address in (f"{path}/files", f"{path}/files/0"):
        assert (await person.get(address)).status_code == 404


CONTENTS = [
    (b"<!doctype html><script>alert(1)</script>", "text"),
    (b"<svg onload=alert(1)>", "text"),
    (HTML_IMAGE, "text"),
    (b"%PDF-1.7\n\0\x80\xff" * 9, "nothing"),
    (b"\xff\xfe\x00x" * 99, "nothing"),
    (b"RIFF\0\0\0\0WAVEfmt ", "nothing"),
    (b"GIF89a<script>alert(1)</script>", "image"),
    (b"\x1b[31mred \xe2\x80\xae", "text"),
]


async def test_markup_is_never_obeyed(state: Path, person: httpx2.AsyncClient, path: str) -> None:
    keep(state, [(f"{number}.html", content) for number, (content, _) in enumerate(CONTENTS)])
    for number, (_, shows) in enumerate(CONTENTS):
        page = (await person.get(f"{path}/files?show={number}")).text
        Shape(page)
        assert "<script>alert" not in page
        assert "<svg onload" not in page
        assert ("so it is not shown" in page) == (shows == "nothing"), number
        assert ('<img src="data:image/gif;base64,' in page) == (shows == "image"), number


async def test_a_huge_file_is_shown_in_part_and_a_bomb_is_not_unpacked(
    state: Path, person: httpx2.AsyncClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(state, [("long.txt", "é".encode() * 6_000_000), ("behind", b"x")])
    page = (await person.get(f"{path}/files?show=0")).text
    assert "Only the beginning is shown." in page
    assert 60_000 < len(page.encode()) < 80_000
    monkeypatch.setattr(workspaces, "MAX_READ_BYTES", 1 << 20)
    page = (await person.get(f"{path}/files")).text
    assert "long.txt" in page
    assert "behind" not in page
    assert "there are more" in page
    assert (await person.get(f"{path}/files/1")).status_code == 404


async def test_of_very_many_files_the_first_are_listed(
    state: Path, person: httpx2.AsyncClient, path: str
) -> None:
    keep(state, [(f"file-{number}", b"") for number in range(workspaces.MAX_LISTED + 1)])
    page = (await person.get(f"{path}/files")).text
    assert page.count("Download") == workspaces.MAX_LISTED
    assert "there are more" in page


@pytest.mark.parametrize("damage", ["cut", "no tar", "huge header"])
async def test_a_damaged_archive_is_said_to_be_one(
    state: Path, person: httpx2.AsyncClient, path: str, damage: str
) -> None:
    kept = keep(state, [("first", b"1"), ("second", bytes(100_000))])
    if damage == "cut":
        # Random bytes, so that the cut is in the middle of a member.
        plain = gzip.decompress(kept.read_bytes())
        kept.write_bytes(gzip.compress(plain)[:-40])
    elif damage == "huge header":
        info = member("bomb")
        info.size = 1 << 60
        kept.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT)))
    else:
        kept.write_bytes(gzip.compress(b"x" * 9_999))
    page = await person.get(f"{path}/files")
    assert page.status_code == 200
    Shape(page.text)
    for number in (0, 1, 2):
        assert (await person.get(f"{path}/files?show={number}")).status_code in (200, 404, 500)
    if damage == "no tar":
        assert "the archive is damaged" in unescape(page.text)
