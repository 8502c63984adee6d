"""Principals, reward policies and access levels."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.settings import RewardPolicy
from tests.episodes.environment import running_registry
from tests.fakes.provider import FakeProvider

ADA = Principal(token="ada")
BOB = Principal(token="bob")
CONTROLLER = Principal(token="trainer", role="controller")
ADMIN = Principal(token="root", role="admin")
NOBODY = Principal()


@pytest.mark.parametrize(
    ("principal", "owner", "allowed"),
    [(ADA, ADA, True), (BOB, ADA, False), (CONTROLLER, ADA, False), (ADMIN, ADA, True), (ADA, NOBODY, True)],
)
def test_an_episode_can_be_used_by_its_owner_and_by_administrators(
    principal: Principal, owner: Principal, allowed: bool
) -> None:
    assert principal.may_use(owner) is allowed


def test_without_tokens_a_session_owns_the_episodes_that_it_started() -> None:
    first, second = Principal(session="1"), Principal(session="2")
    assert first.owns(first)
    assert not second.owns(first)
    assert not NOBODY.owns(NOBODY)


def test_with_tokens_the_session_does_not_matter() -> None:
    assert Principal(token="ada", session="2").owns(Principal(token="ada", session="1"))
    assert not Principal(token="bob", session="1").owns(Principal(token="ada", session="1"))
    assert not Principal(session="1").owns(Principal(token="ada", session="1"))
    assert ADMIN.owns(ADA)


@pytest.mark.parametrize("policy", get_args(RewardPolicy))
def test_only_policy_controller_stops_a_player_who_knows_the_handle_from_evaluating(
    policy: RewardPolicy,
) -> None:
    assert ADA.may_evaluate(policy) is (policy != "controller")
    assert CONTROLLER.may_evaluate(policy)
    assert ADMIN.may_evaluate(policy)
    assert NOBODY.may_evaluate(policy), "without tokens the handle is enough"


def test_a_new_episode_gets_the_servers_policy_or_one_that_reveals_less() -> None:
    assert ADA.choose_policy(None, "meta") == "meta"
    assert ADA.choose_policy("meta", "meta") == "meta"
    assert ADA.choose_policy("controller", "meta") == "controller"


def test_only_a_controller_gets_a_policy_that_reveals_more() -> None:
    with pytest.raises(AccessDeniedError, match=r"'meta'.*such as 'visible'"):
        ADA.choose_policy("visible", "meta")
    assert CONTROLLER.choose_policy("visible", "controller") == "visible"
    assert ADMIN.choose_policy("visible", "controller") == "visible"


@pytest.mark.anyio
async def test_a_handle_allows_evaluation_and_an_agent_id_never_does(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider()) as registry:
        episode = registry.start("find-answer", ADA)
        by_handle = EpisodeAccess.by_handle(episode, ADA)
        by_agent_id = EpisodeAccess.by_agent_id(episode)
    assert (by_handle.id, by_handle.can_evaluate) == (episode.id, True)
    assert (by_agent_id.id, by_agent_id.can_evaluate) == (episode.spec.agent_id, False)


@pytest.mark.anyio
@pytest.mark.parametrize("policy", get_args(RewardPolicy))
async def test_turns_are_believed_from_whoever_has_the_handle_only_where_no_agent_has_it(
    tmp_path: Path, policy: RewardPolicy
) -> None:
    async with running_registry(tmp_path, FakeProvider(), reward=policy) as registry:
        episode = registry.start("find-answer", NOBODY)
        player = EpisodeAccess.by_handle(episode, NOBODY)
        trainer = EpisodeAccess.by_handle(episode, CONTROLLER)
        agent = EpisodeAccess.by_agent_id(episode)
    assert player.reports_turns is (policy == "controller")
    assert trainer.reports_turns
    assert not agent.reports_turns


@pytest.mark.anyio
async def test_under_policy_controller_a_session_gets_the_agent_id_unless_its_token_controls(
    tmp_path: Path,
) -> None:
    async with running_registry(tmp_path, FakeProvider(), reward="controller") as registry:
        episode = registry.start("find-answer", NOBODY)
        player = EpisodeAccess.by_session(episode, NOBODY)
        trainer = EpisodeAccess.by_session(episode, CONTROLLER)
    assert (player.id, player.can_evaluate) == (episode.spec.agent_id, False)
    assert (trainer.id, trainer.can_evaluate) == (episode.id, True)
