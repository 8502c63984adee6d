"""Plays restock-shop on a server in this process.

Sandboxes never contain this folder, so the solution can be here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from decathlon_client import Verdict
from decathlon_client.sync import Decathlon

SUITE = Path(__file__).resolve().parent.parent
TASK = "restock-shop"
SOLUTION = {"tea": 12, "cocoa": 6, "yeast": 20, "sugar": 36, "candles": 6, "soap": 11}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decathlon]:
    state = tmp_path_factory.mktemp("state")
    with Decathlon.embedded(SUITE, provider="host", state=state) as server:
        yield server


def play(server: Decathlon, order: Mapping[str, int]) -> Verdict:
    with server.episode(TASK) as episode:
        for product, quantity in order.items():
            reply = episode.call("shop__order", {"product": product, "quantity": quantity})
            assert not reply.is_error, reply.text
        episode.claim_done()
        return episode.evaluate()


def test_an_idle_attempt_gets_nothing(server: Decathlon) -> None:
    verdict = play(server, {})
    assert (verdict.success, verdict.reward) == (False, 0.0)


def test_half_of_the_order_gets_a_part_of_the_reward(server: Decathlon) -> None:
    verdict = play(server, dict(list(SOLUTION.items())[:3]))
    assert (verdict.success, verdict.reward) == (False, pytest.approx(0.5 * 3 / 4))


def test_ordering_too_much_costs_what_a_correct_line_brings(server: Decathlon) -> None:
    verdict = play(server, {**SOLUTION, "flour": 10})
    assert (verdict.success, verdict.reward) == (False, pytest.approx(5 / 6 * 3 / 4))


def test_the_expected_order_passes_with_the_whole_reward(server: Decathlon) -> None:
    verdict = play(server, SOLUTION)
    assert (verdict.success, verdict.reward) == (True, 1.0), verdict.raw["evaluator_output"]


def test_the_agent_sees_what_it_needs_to_know(server: Decathlon) -> None:
    with server.episode(TASK) as episode:
        shelves = episode.call("shop__list_shelves").text.split()
        shown = "\n".join(episode.call("shop__read_shelf", {"shelf": shelf}).text for shelf in shelves)
    assert all(f"{product}:" in shown for product in SOLUTION)
