"""Which tasks are for training and which for testing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decathlon_mcp.suites.splits import packaged_splits, splits_of

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout


def splits(checkout: Checkout) -> dict[str, tuple[str, ...]]:
    return {name: task.splits for name, task in checkout.load().tasks.items()}


def test_toolathlons_tasks_are_divided_by_lists_80_to_28() -> None:
    listed = packaged_splits("toolathlon")
    assert len(listed) == 108
    assert sum(split == "train" for split in listed.values()) == 80
    assert set(listed.values()) == {"train", "test"}


def test_a_listed_task_is_in_its_split_and_one_of_the_same_checkout_that_is_not_by_its_hash(
    checkout: Checkout,
) -> None:
    checkout.task("imagenet")
    checkout.task("somebodys-own")
    listed = packaged_splits("toolathlon")["imagenet"]
    assert splits(checkout) == {"imagenet": (listed,), "somebodys-own": splits_of("somebodys-own", {})}


def test_a_checkouts_own_lists_are_all_there_is(checkout: Checkout) -> None:
    checkout.task("imagenet")
    checkout.task("somebodys-own")
    checkout.write("suite.yaml", "splits: {mine: [some*]}\n")
    assert splits(checkout) == {"imagenet": (), "somebodys-own": ("mine",)}


def test_another_profile_has_no_part_in_the_lists(gym: Checkout) -> None:
    gym.task("imagenet")
    assert splits(gym) == {"imagenet": splits_of("imagenet", {})}


def test_the_hash_divides_about_80_to_20_and_never_changes() -> None:
    found = [splits_of(f"task-{number}", {}) for number in range(1000)]
    assert 760 < sum(split == ("train",) for split in found) < 840
    assert [number for number in range(40) if found[number] == ("test",)] == [2, 11, 26, 29, 34]
