"""Control groups of both versions, in folders that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from decathlon_mcp.sandboxes.host.cgroups import Group, Hierarchies


class Machine:
    """A /proc/self with its mounts of control groups."""

    def __init__(self, folder: Path) -> None:
        self.process = folder / "self"
        self.process.mkdir()
        self._mounts: list[str] = []
        self._groups: list[str] = []

    def mount(self, path: Path, kind: str, options: str, group: str, top: str = "/") -> None:
        self._mounts.append(f"1 2 0:3 {top} {path} rw,relatime - {kind} {kind} rw,{options}\n")
        controllers = "" if kind == "cgroup2" else options
        self._groups.append(f"{len(self._groups)}:{controllers}:{group}\n")
        (self.process / "mountinfo").write_text("".join(self._mounts))
        (self.process / "cgroup").write_text("".join(self._groups))

    def hierarchies(self) -> Hierarchies:
        return Hierarchies.of_this_process(self.process)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def group_folder(path: Path, controllers: str = "", *, passed_on: str = "") -> Path:
    path.mkdir(parents=True)
    for name, text in {
        "cgroup.procs": "",
        "cgroup.controllers": controllers,
        "cgroup.subtree_control": passed_on,
    }.items():
        (path / name).write_text(text)
    return path


def test_groups_of_version_1_are_created_in_the_servers_own(machine: Machine, tmp_path: Path) -> None:
    memory = group_folder(tmp_path / "memory" / "service")
    machine.mount(tmp_path / "memory", "cgroup", "memory", "/container/service", top="/container")
    machine.mount(tmp_path / "cpu", "cgroup", "cpu,cpuacct", "/elsewhere")
    assert machine.hierarchies().by_limit == {"memory": memory}
    assert machine.hierarchies().unlimited == ("cpus", "pids")


def test_groups_of_version_2_are_created_where_controllers_are_passed_on(
    machine: Machine, tmp_path: Path
) -> None:
    top = group_folder(tmp_path / "unified", "cpu memory pids io", passed_on="cpu memory pids")
    slice_folder = group_folder(top / "user.slice", "memory pids", passed_on="memory pids")
    group_folder(slice_folder / "server.scope", "memory pids")
    (slice_folder / "server.scope" / "cgroup.controllers").write_text("")
    machine.mount(top, "cgroup2", "nsdelegate", "/user.slice/server.scope")
    # All in one group, although the controller of CPUs is only passed on further up.
    assert machine.hierarchies().by_limit == {"memory": slice_folder, "pids": slice_folder}
    group = machine.hierarchies().group("sandbox")
    assert group.folders == [slice_folder / "sandbox"]


def test_machine_without_control_groups_limits_nothing(machine: Machine, tmp_path: Path) -> None:
    assert machine.hierarchies().unlimited == ("memory", "cpus", "pids")
    machine.mount(tmp_path / "missing", "cgroup", "memory", "/")
    assert machine.hierarchies().unlimited == ("memory", "cpus", "pids")


LIMIT, MOST = {"memory.limit_in_bytes": "100\n"}, "memory.max_usage_in_bytes"
KILLED_AT_ITS_LIMIT: list[tuple[dict[str, str], bool]] = [
    ({"memory.events": "max 3\noom 1\noom_kill 1\n"}, True),
    ({"memory.events": "max 0\noom 0\noom_kill 1\n"}, False),
    ({"memory.oom_control": "under_oom 0\noom_kill 1\n", **LIMIT, MOST: "99\n"}, True),
    ({"memory.oom_control": "oom_kill 1\n", **LIMIT, MOST: "50\n"}, False),
]


@pytest.mark.parametrize(("files", "at_limit"), KILLED_AT_ITS_LIMIT)
def test_process_that_is_killed_for_others_is_not_out_of_memory(
    tmp_path: Path, files: dict[str, str], at_limit: bool
) -> None:
    """Where the machine lacks memory, the kernel kills processes of groups that are below their limits."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Group({tmp_path}).was_out_of_memory is at_limit


def test_what_a_group_uses_is_a_part_of_its_limits(tmp_path: Path) -> None:
    for name, text in {
        "memory.current": "50\n",
        "memory.max": "100\n",
        "pids.current": "3\n",
        "pids.max": "max\n",
    }.items():
        (tmp_path / name).write_text(text)
    usage = Group({tmp_path}).usage()
    assert (usage.memory, usage.pids, usage.over()) == (0.5, None, None)
    (tmp_path / "memory.current").write_text("99\n")
    assert Group({tmp_path}).usage().over() == "memory"


def test_group_that_is_gone_is_removed_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decathlon_mcp.sandboxes.host.cgroups.REMOVE_SECONDS", 0.05)
    (tmp_path / "empty").mkdir()
    assert Group({tmp_path / "missing", tmp_path / "empty"}).remove()
    (tmp_path / "used" / "below").mkdir(parents=True)
    assert not Group({tmp_path / "used"}).remove()
