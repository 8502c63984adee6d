"""Splits: the packaged lists, a suite's own lists, and the hash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decathlon_mcp.suites.loading import packaged_splits, splits_of

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout


def splits(checkout: Checkout) -> dict[str, tuple[str, ...]]:
    return {name: task.splits for name, task in checkout.load().tasks.items()}


def test_toolathlons_packaged_split_is_80_to_28() -> None:
    listed = packaged_splits("toolathlon")
    assert len(listed) == 108
    assert sum(split == "train" for split in listed.values()) == 80
    assert set(listed.values()) == {"train", "test"}


def test_a_listed_task_is_in_its_split_and_another_is_split_by_its_hash(
    checkout: Checkout,
) -> None:
    checkout.task("imagenet")
    checkout.task("my-own")
    listed = packaged_splits("toolathlon")["imagenet"]
    assert splits(checkout) == {"imagenet": (listed,), "my-own": splits_of("my-own", {})}


def test_the_hash_splits_about_80_to_20_and_never_changes() -> None:
    by_number = [splits_of(f"task-{number}", {}) for number in range(1000)]
    assert 760 < sum(split == ("train",) for split in by_number) < 840
    assert [number for number in range(40) if by_number[number] == ("test",)] == [2, 11, 26, 29, 34]
