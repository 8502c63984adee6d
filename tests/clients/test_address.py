"""The server and the token of a client: from arguments or environment variables, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from decathlon_client import AccessDeniedError, Decathlon, ManagedEpisode, sync

from decathlon_mcp.http.authentication import Tokens, new_token
from tests.probe.serving import serving

NOWHERE = "http://127.0.0.1:1"


@pytest.mark.anyio
async def test_variables_are_the_defaults_of_every_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, line = new_token("player-one", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", provider="host", tokens=tokens) as served:
        monkeypatch.setenv("DECATHLON_URL", f"{served.url}/mcp")
        monkeypatch.setenv("DECATHLON_TOKEN", secret)
        async with Decathlon() as d, d.episode("find-answer") as e:
            assert served.find(e.id).spec.owner.token == "player-one"
        managed = await ManagedEpisode.open("find-answer")
        assert managed.episode.address.startswith(served.url)
        await managed.close()
        monkeypatch.setenv("DECATHLON_URL", NOWHERE)
        monkeypatch.setenv("DECATHLON_TOKEN", "another")
        async with Decathlon(served.url, token=secret) as d:
            assert await d.tasks(prompts=False)
        for token, problem in ((None, "no such token"), ("", "a token is needed.*DECATHLON_TOKEN")):
            with pytest.raises(AccessDeniedError, match=problem):
                async with Decathlon(served.url, token=token):
                    pass


@pytest.mark.parametrize("client", [Decathlon, sync.Decathlon])
def test_an_invalid_url_is_refused_by_the_name_of_its_source(
    client: type[Decathlon | sync.Decathlon], monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("127.0.0.1:8765", "http://127.0.0.1/tasks/a/mcp", "http://[", "http://a:b", ""):
        with pytest.raises(ValueError, match="url: not the address of a server"):
            client(url)
        monkeypatch.setenv("DECATHLON_URL", url)
        with pytest.raises(ValueError, match="DECATHLON_URL: not the address of a server"):
            client()


def test_an_invalid_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("secret\n", "se cret", "secrét"):
        with pytest.raises(ValueError, match="token: not a token") as caught:
            Decathlon(NOWHERE, token)
        assert "cr" not in str(caught.value)
        monkeypatch.setenv("DECATHLON_TOKEN", token)
        with pytest.raises(ValueError, match="DECATHLON_TOKEN: not a token"):
            Decathlon(NOWHERE)
    # A template that a program has not filled in is no token.
    monkeypatch.setenv("DECATHLON_TOKEN", "${user_config.the token}")
    Decathlon(NOWHERE)
