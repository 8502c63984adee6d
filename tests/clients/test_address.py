"""The server and the token of a client: from arguments or environment variables, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from decathlon_client import AccessDeniedError, Decathlon, ManagedEpisode, sync

from decathlon_mcp.http.authentication import Tokens, new_token
from tests.probe.serving import Served, serving

NOWHERE = "http://127.0.0.1:1"


@pytest.mark.anyio
async def test_variables_are_the_defaults_of_every_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, line = new_token("player-one", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", provider="host", tokens=tokens) as served:
        monkeypatch.setenv("DECATHLON_URL", served.url)
        monkeypatch.setenv("DECATHLON_TOKEN", secret)
        async with Decathlon() as d, d.episode("find-answer") as e:
            assert served.find(e.id).spec.owner.token == "player-one"
        managed = await ManagedEpisode.open("find-answer")
        assert managed.episode.address.startswith(served.url)
        await managed.close()
        with pytest.raises(AccessDeniedError, match="DECATHLON_TOKEN"):
            async with Decathlon(token=""):
                pass
        monkeypatch.setenv("DECATHLON_TOKEN", "another")
        async with Decathlon(token=secret) as d:
            assert await d.tasks(prompts=False)
        with pytest.raises(AccessDeniedError, match="DECATHLON_TOKEN"):
            async with Decathlon():
                pass


@pytest.mark.anyio
async def test_an_argument_takes_precedence_over_the_variable(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECATHLON_URL", NOWHERE)
    async with Decathlon(served.url) as d:
        assert await d.tasks(prompts=False)


@pytest.mark.parametrize("client", [Decathlon, sync.Decathlon])
@pytest.mark.parametrize(
    "url", ["127.0.0.1:8765", "http://127.0.0.1/tasks/a/mcp", "http://[", "http://a:b", ""]
)
def test_an_invalid_url_is_refused_by_the_name_of_its_source(
    client: type[Decathlon | sync.Decathlon], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="url: not the address of a server"):
        client(url)
    monkeypatch.setenv("DECATHLON_URL", url)
    with pytest.raises(ValueError, match="DECATHLON_URL: not the address of a server"):
        client()


@pytest.mark.parametrize("token", ["secret\n", "se cret", "secrét"])
def test_an_invalid_token_is_refused_and_not_shown(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="token: not a token") as caught:
        Decathlon(NOWHERE, token)
    assert "cr" not in str(caught.value)
    monkeypatch.setenv("DECATHLON_TOKEN", token)
    with pytest.raises(ValueError, match="DECATHLON_TOKEN: not a token"):
        Decathlon(NOWHERE)


def test_a_template_that_a_program_has_not_filled_in_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECATHLON_TOKEN", "${user_config.the token}")
    Decathlon(NOWHERE)
