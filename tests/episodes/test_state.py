"""The phases of an episode and their transitions."""

from __future__ import annotations

import pytest

from decathlon_mcp.episodes.state import TRANSITIONS, Ending, Phase, State
from decathlon_mcp.errors import SetUpError


def test_every_phase_can_end_and_none_comes_back() -> None:
    assert all(Phase.ENDED in TRANSITIONS[phase] for phase in Phase if phase is not Phase.ENDED)
    order = list(Phase)
    assert all(
        order.index(successor) > order.index(phase)
        for phase, successors in TRANSITIONS.items()
        for successor in successors
    )


def test_a_transition_that_is_not_in_the_table_raises() -> None:
    state = State("080c0b1ed55c92a1")
    with pytest.raises(RuntimeError, match="from queued to scored"):
        state.move(Phase.SCORED)


def test_the_first_ending_stands() -> None:
    state, cause = State("080c0b1ed55c92a1"), SetUpError("no server")
    state.end(Ending.SET_UP_FAILED, cause)
    state.end(Ending.FAULT)
    assert (state.phase, state.ending) == (Phase.ENDED, Ending.SET_UP_FAILED)
    assert str(state.cause) == str(cause)
