"""The filter for an agent's workspace before it is graded."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.archives.cleaning import clean_workspace

Build = Callable[[tarfile.TarFile], None]


class Cleaned:
    """A workspace's archive before and after the filter."""

    def __init__(
        self, folder: Path, build: Build, *, limit_bytes: int = 1 << 20, limit_members: int = 1000
    ) -> None:
        before, self.after = folder / "before.tar", folder / "after.tar"
        with tarfile.open(before, "w", format=tarfile.GNU_FORMAT) as tar:
            build(tar)
        self.refused = clean_workspace(
            before, self.after, prefix="dumps/workspace", limit_bytes=limit_bytes, limit_members=limit_members
        )

    def members(self) -> dict[str, tarfile.TarInfo]:
        with tarfile.open(self.after) as tar:
            return {info.name.removeprefix("dumps/workspace").lstrip("/"): info for info in tar}

    def names(self) -> list[str]:
        return sorted(name for name in self.members() if name)

    def read(self, name: str) -> bytes:
        with tarfile.open(self.after) as tar:
            file = tar.extractfile(f"dumps/workspace/{name}")
            assert file is not None
            return file.read()


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def add(tar: tarfile.TarFile, name: str, body: bytes = b"x", mode: int = 0o644) -> None:
    info = entry(name, mode=mode)
    info.size = len(body)
    tar.addfile(info, io.BytesIO(body))


def test_files_and_folders_are_kept_unchanged(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        tar.addfile(entry(".", tarfile.DIRTYPE, mode=0o755))
        tar.addfile(entry("./notes", tarfile.DIRTYPE, mode=0o700))
        add(tar, "./notes/\u7b54\u6848.txt", b"42")
        add(tar, "./empty", b"")
        add(tar, "./with\nnewline", b"n")
        add(tar, "./run.sh", b"#!", mode=0o755)
        add(tar, f"./{'d' * 120}/{'f' * 150}", b"long")

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.refused == []
    assert cleaned.read("notes/\u7b54\u6848.txt") == b"42"
    assert cleaned.read("with\nnewline") == b"n"
    assert cleaned.read(f"{'d' * 120}/{'f' * 150}") == b"long"
    assert cleaned.members()["run.sh"].mode == 0o755


def test_empty_workspace_is_still_a_folder(tmp_path: Path) -> None:
    assert Cleaned(tmp_path, lambda tar: None).members()[""].isdir()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("link", "./sub"),
        ("a/b/link", "../../file"),
        ("link", "nowhere"),
    ],
)
def test_symlinks_that_stay_inside_are_kept(tmp_path: Path, name: str, target: str) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: tar.addfile(entry(name, tarfile.SYMTYPE, link=target)))
    assert cleaned.refused == []
    assert cleaned.members()[name].issym()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("link", "/etc/passwd"),
        ("link", ".."),
        ("a/link", "b/../../.."),
        ("a/b/link", "up/../x"),
        ("link", ""),
    ],
)
def test_symlinks_that_lead_out_are_refused(tmp_path: Path, name: str, target: str) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: tar.addfile(entry(name, tarfile.SYMTYPE, link=target)))
    assert not any(info.issym() for info in cleaned.members().values())
    assert cleaned.refused[0].startswith(f"{name}: a link")


@pytest.mark.parametrize(
    ("name", "target", "relative"),
    [
        ("link", "/dumps/workspace", "."),
        ("link", "//dumps/./workspace//a/./b/", "a/b"),
        ("a/b/link", "/dumps/workspace/c", "../../c"),
    ],
)
def test_absolute_links_into_the_workspace_become_relative(
    tmp_path: Path, name: str, target: str, relative: str
) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: tar.addfile(entry(name, tarfile.SYMTYPE, link=target)))
    assert cleaned.refused == []
    assert cleaned.members()[name].linkname == relative


@pytest.mark.parametrize(
    "target",
    [
        "/dumps/workspace/../../etc",
        "/dumps/../dumps/workspace/a",
        "/dumps/workspacex/a",
        "/dumps/workspace/" + "a/" * 3000,
    ],
)
def test_absolute_links_that_only_begin_in_the_workspace_are_refused(tmp_path: Path, target: str) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: tar.addfile(entry("a/b/link", tarfile.SYMTYPE, link=target)))
    assert not any(info.issym() for info in cleaned.members().values())
    assert len(cleaned.refused) == 1


def test_other_names_of_a_symlink_are_symlinks(tmp_path: Path) -> None:
    """Docker packs a symlink with several names as hard links, which a kernel would take as such."""

    def build(tar: tarfile.TarFile) -> None:
        tar.addfile(entry("./a/link", tarfile.SYMTYPE, link="../file"))
        tar.addfile(entry("./a/b/other", tarfile.LNKTYPE, link="./a/link"))
        tar.addfile(entry("./top", tarfile.LNKTYPE, link="a/link"))
        tar.addfile(entry("./absolute", tarfile.SYMTYPE, link="/dumps/workspace/file"))
        tar.addfile(entry("./a/absolute", tarfile.LNKTYPE, link="./absolute"))
        tar.addfile(entry("./out", tarfile.SYMTYPE, link="/etc/passwd"))
        tar.addfile(entry("./a/out", tarfile.LNKTYPE, link="./out"))
        tar.addfile(entry("./a/git", tarfile.SYMTYPE, link=".git"))
        tar.addfile(entry("./git", tarfile.LNKTYPE, link="./a/git"))

    cleaned = Cleaned(tmp_path, build)
    links = {name: info.linkname for name, info in cleaned.members().items() if info.issym() or info.islnk()}
    assert links == {
        "a/link": "../file",
        "a/b/other": "../file",
        "absolute": "file",
        "a/absolute": "../file",
    }
    assert sorted(line.partition(":")[0] for line in cleaned.refused) == [
        "a/git",
        "a/out",
        "git",
        "out",
        "top",
    ]


def test_targets_of_many_symlinks_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decathlon_mcp.archives.workspace.MAX_LINK_BYTES", 2 * 105 - 1)

    def build(tar: tarfile.TarFile) -> None:
        for number in range(3):
            tar.addfile(entry(f"{number}", tarfile.SYMTYPE, link="x" * 5))
            tar.addfile(entry(f"other{number}", tarfile.LNKTYPE, link=f"{number}"))

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.names() == ["0", "1", "2", "other0"]
    assert len(cleaned.refused) == 2


def test_chain_of_links_never_leads_out(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        tar.addfile(entry("p/q/top", tarfile.SYMTYPE, link="../.."))
        tar.addfile(entry("p/q/out", tarfile.SYMTYPE, link="top/../../etc"))
        add(tar, "p/q/top/planted")

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.names() == ["p", "p/q", "p/q/top"]
    assert cleaned.refused == [
        "p/q/out: a link that leads out, to top/../../etc",
        "p/q/top/planted: below p/q/top, which is no folder",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/cron.d/x",
        "../x",
        "a/../../x",
    ],
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: add(tar, name))
    assert cleaned.names() == []
    assert len(cleaned.refused) == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a FIFO"),
        (b"Z", "of an unknown kind"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
    ],
)
def test_devices_fifos_and_unknown_kinds_are_refused(tmp_path: Path, kind: bytes, reason: str) -> None:
    def build(tar: tarfile.TarFile) -> None:
        tar.addfile(entry("thing", kind))
        add(tar, "after")

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.names() == ["after"]
    assert cleaned.refused == [f"thing: {reason}"]


def test_set_id_bits_are_removed(tmp_path: Path) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: add(tar, "su", mode=0o6755))
    assert cleaned.members()["su"].mode == 0o755
    assert cleaned.refused == ["su: set-id bits were taken away"]


def test_unreadable_files_become_readable(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        tar.addfile(entry("closed", tarfile.DIRTYPE, mode=0))
        add(tar, "closed/file", mode=0)

    members = Cleaned(tmp_path, build).members()
    assert (members["closed"].mode, members["closed/file"].mode) == (0o755, 0o644)


def test_hard_links_are_kept_only_to_files_that_were_kept(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        add(tar, "file", b"body")
        tar.addfile(entry("twin", tarfile.LNKTYPE, link="./file"))
        tar.addfile(entry("thief", tarfile.LNKTYPE, link="../../tasks/answer"))
        tar.addfile(entry("thief2", tarfile.LNKTYPE, link="/etc/shadow"))
        tar.addfile(entry("link", tarfile.SYMTYPE, link="file"))
        tar.addfile(entry("thief3", tarfile.LNKTYPE, link="later"))

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.names() == ["file", "link", "twin"]
    assert cleaned.read("twin") == b"body"
    assert len(cleaned.refused) == 3


def test_first_of_two_members_with_one_name_is_kept(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        tar.addfile(entry("folder", tarfile.DIRTYPE, mode=0o755))
        add(tar, "folder/file", b"first")
        tar.addfile(entry("folder", tarfile.SYMTYPE, link="elsewhere"))
        tar.addfile(entry("./folder/", tarfile.DIRTYPE, mode=0o755))
        add(tar, "folder/file", b"second")
        add(tar, "folder/file/below")
        add(tar, "implied/file")
        add(tar, "implied")

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.read("folder/file") == b"first"
    assert cleaned.members()["folder"].isdir()
    assert cleaned.members()["implied"].isdir()
    assert cleaned.refused == [
        "folder: something of that name came before it",
        "folder/file: something of that name came before it",
        "folder/file/below: below folder/file, which is no folder",
        "implied: something of that name came before it",
    ]


def test_file_above_the_remaining_limit_is_refused_and_later_ones_are_kept(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        add(tar, "huge", bytes(2000))
        add(tar, "small", bytes(600))
        add(tar, "second", bytes(401))
        add(tar, "exact", bytes(400))
        add(tar, "last", bytes(1))

    cleaned = Cleaned(tmp_path, build, limit_bytes=1000)
    assert cleaned.names() == ["exact", "small"]
    assert cleaned.refused == [
        "huge: too large (2000 bytes, 1000 left)",
        "second: too large (401 bytes, 400 left)",
        "last: too large (1 bytes, 0 left)",
    ]


def test_members_above_the_limit_are_left_out(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        for number in range(20):
            add(tar, f"file{number}")

    cleaned = Cleaned(tmp_path, build, limit_members=10)
    assert len(cleaned.names()) == 10
    assert cleaned.refused == ["more than 10 members: the rest was left out"]


def test_missing_parents_count_as_members(tmp_path: Path) -> None:
    cleaned = Cleaned(tmp_path, lambda tar: add(tar, "/".join("d" * 900)), limit_members=100)
    assert len(cleaned.names()) < 100
    assert cleaned.refused == ["more than 100 members: the rest was left out"]


@pytest.mark.parametrize("name", ["n" * 256, "/".join(["n" * 200] * 11), "n" * 70_000])
def test_names_that_are_too_long_are_refused(tmp_path: Path, name: str) -> None:
    def build(tar: tarfile.TarFile) -> None:
        add(tar, name)
        add(tar, "after")

    cleaned = Cleaned(tmp_path, build)
    assert cleaned.names() == ["after"]
    assert cleaned.refused[0].endswith("its name is too long")


def test_reports_are_bounded_and_on_one_line_each(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        for number in range(150):
            tar.addfile(entry(f"evil\n{number}", tarfile.FIFOTYPE))

    refused = Cleaned(tmp_path, build).refused
    assert refused[0] == r"evil\n0: a FIFO"
    assert (len(refused), refused[-1]) == (101, "and 50 more")


def test_reports_with_long_names_are_bounded_together(tmp_path: Path) -> None:
    def build(tar: tarfile.TarFile) -> None:
        for number in range(150):
            # Each byte of such a name takes five characters in a report.
            tar.addfile(entry(f"{number}" + "\udcff" * 190, tarfile.FIFOTYPE))

    refused = Cleaned(tmp_path, build).refused
    assert sum(map(len, refused)) < 20_000
    assert refused[-1] == f"and {150 - len(refused) + 1} more"


@pytest.mark.parametrize("keep", [700, 1024 + 700])
def test_truncated_archive_gives_its_whole_members(tmp_path: Path, keep: int) -> None:
    whole, before, after = tmp_path / "whole.tar", tmp_path / "before.tar", tmp_path / "after.tar"
    with tarfile.open(whole, "w", format=tarfile.GNU_FORMAT) as tar:
        add(tar, "first", b"1" * 512)
        add(tar, "second", b"2" * 512)
    before.write_bytes(whole.read_bytes()[:keep])
    refused = clean_workspace(before, after, prefix="", limit_bytes=1 << 20, limit_members=10)
    with tarfile.open(after) as tar:
        assert tar.getnames() == ["first"][: keep // 1024]
    assert "the rest was left out" in refused[0]


def test_invalid_archive_gives_an_empty_workspace(tmp_path: Path) -> None:
    before, after = tmp_path / "before.tar", tmp_path / "after.tar"
    before.write_bytes(b"reward: 1.0\n" * 1000)
    refused = clean_workspace(before, after, prefix="w", limit_bytes=1 << 20, limit_members=10)
    with tarfile.open(after) as tar:
        assert tar.getnames() == ["w"]
    assert refused == ["there is no valid header at byte 0: the rest was left out"]
