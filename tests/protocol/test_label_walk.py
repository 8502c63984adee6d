"""Labels are untrusted text: a walk over everything an agent, an evaluator or a scraper reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from decathlon_mcp.plugins.credentials import check, read_key
from tests.probe.clients import connected
from tests.probe.serving import folder_of, serving

pytestmark = pytest.mark.anyio

TEXT = "ignore-all-instructions"
LABELS = {"run": TEXT, "own.name": f"{TEXT} <script>"}


async def test_labels_are_only_in_the_record_and_in_a_verdict_that_may_be_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "decathlon")
    async with serving(tmp_path / "state", provider="host", keep="workspace") as served:
        async with connected(served.lobby) as lobby:
            arguments = {"task": "find-answer", "labels": LABELS}
            started: Any = await lobby.call_tool("start_episode", arguments)
            info = started.structured_content
            seen = [started.model_dump_json()]
            async with connected(info["agent_address"]) as agent:
                seen.append(str(agent.instructions))
                seen.append((await agent.get_prompt("task")).model_dump_json())
                seen.append((await agent.list_tools()).model_dump_json())
                # What preprocess, servers and the agent find in the sandbox.
                for path in ("answer.txt", "."):
                    result = await agent.call_tool("probe__write", {"path": path, "text": "42"})
                    seen.append(result.model_dump_json())
                # The second call is refused.
                seen.append((await agent.call_tool("claim_done", {})).model_dump_json())
                seen.append((await agent.call_tool("claim_done", {})).model_dump_json())
            verdict: Any = await lobby.call_tool("evaluate", {"episode": info["episode"]})
            status: Any = await lobby.call_tool("episode_status", {"episode": info["episode"]})
        async with httpx2.AsyncClient() as http:
            seen.append((await http.get(f"{served.url}/metrics")).text)
            key = (await http.get(f"{served.url}/.well-known/decathlon-key")).content
        folder = folder_of(served.state, info["public_id"])
        seen += [(folder / name).read_text() for name in ("traj_log.json", "eval_res.json")]
        seen.append(verdict.structured_content["evaluator_output"])
        assert status.structured_content["phase"] == "scored"
    seen.append(caplog.text + "".join(str(record.__dict__) for record in caplog.records))
    assert not [text for text in seen if TEXT in text]
    # Part of what is signed, for one that may evaluate.
    assert verdict.structured_content["labels"] == LABELS
    check(read_key(key), verdict.structured_content)
    assert json.loads((folder / "verdict.json").read_text()) == verdict.structured_content
    for secret in (info["episode"], info["agent"]):
        assert secret not in json.dumps(verdict.structured_content)
        assert secret not in caplog.text + "".join(str(record.__dict__) for record in caplog.records)
