"""The table of an episode's phases."""

from __future__ import annotations

import pytest

from decathlon_mcp.episodes.state import TRANSITIONS, Ending, Phase, State


def test_every_phase_can_end_and_none_comes_back() -> None:
    assert all(Phase.ENDED in TRANSITIONS[phase] for phase in Phase if phase is not Phase.ENDED)
    order = list(Phase)
    assert all(
        order.index(after) > order.index(phase) for phase, then in TRANSITIONS.items() for after in then
    )


def test_a_move_that_the_table_does_not_have_is_a_fault_of_ours() -> None:
    state = State()
    with pytest.raises(RuntimeError, match="from queued to scored"):
        state.move(Phase.SCORED)


def test_the_first_ending_stands() -> None:
    state = State()
    state.end(Ending.CLOSED)
    state.end(Ending.FAULT)
    assert state.ending is Ending.CLOSED
