"""What the resources server does at limits, without a verdict, and with sessions that nobody closes.

Argument: the server's URL. No agent and no Ray: the requests of NeMo Gym's agents are made here.
"""

import sys
import time

from decathlon_client.adapters.nemo_gym import ToolDecathlonConfig, ToolDecathlonResourcesServer
from decathlon_client.sync import Decathlon
from fastapi.testclient import TestClient
from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

CALL = {"type": "function_call", "name": "files__read_file", "arguments": "{}", "call_id": "1", "id": "1"}
REPLY = {"type": "function_call_output", "call_id": "1", "output": "no"}
ROW = {"responses_create_params": {"input": "the prompt"}, "task": "tune-reactor"}
RESPONSE = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": [CALL, REPLY]}
STOPPED = ROW | {"response": RESPONSE | {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}}


def resources_server(url: str, **options: float) -> ToolDecathlonResourcesServer:
    place = {"host": "127.0.0.1", "port": 1}
    names = {"name": "tool_decathlon", "entrypoint": "app.py", "domain": "agent"}
    config = ToolDecathlonConfig(**place, **names, url=url, **options)
    head = BaseServerConfig(**place)
    client = ServerClient(head_server_config=head, global_config_dict=DictConfig({}))
    return ToolDecathlonResourcesServer(config=config, server_client=client)


def has_no_reward(response) -> bool:
    if "mask_sample" not in BaseVerifyResponse.model_fields:
        return response.status_code == 503
    return response.json()["mask_sample"] and response.json()["failure_reason"] != ""


def seed(client: TestClient, server: ToolDecathlonResourcesServer) -> str:
    """Open an episode and return its handle."""
    before = set(server._rollouts)
    response = client.post("/seed_session", json=ROW)
    assert response.status_code == 200, response.text
    (session,) = set(server._rollouts) - before
    return server._rollouts[session].opening.result().episode.id


def phase(d: Decathlon, handle: str) -> str:
    return d.call_lobby("episode_status", {"episode": handle}).structured["phase"]


def ends(d: Decathlon, handle: str) -> bool:
    """Whether an episode ends in a minute: what closes it does not wait until its sandbox is removed."""
    deadline = time.monotonic() + 60
    while phase(d, handle) != "ended" and time.monotonic() < deadline:
        time.sleep(0.1)
    return phase(d, handle) == "ended"


def main(url: str) -> None:
    server = resources_server(url)
    with Decathlon(url) as d, TestClient(server.setup_webserver()) as client:
        seed(client, server)
        verified = client.post("/verify", json=STOPPED).json()
        if verified["verdict"]["truncated"] and verified["task"] == "tune-reactor":
            print("truncated", verified["reward"])  # noqa: T201

        d.call_lobby("close_episode", {"episode": seed(client, server)})
        if has_no_reward(client.post("/verify", json=STOPPED)):
            print("no verdict, no reward")  # noqa: T201

        stranger = TestClient(client.app)
        if has_no_reward(stranger.post("/verify", json=STOPPED)):
            print("no session, no reward")  # noqa: T201

    server = resources_server(url, idle_seconds=0)
    with Decathlon(url) as d, TestClient(server.setup_webserver()) as client:
        abandoned = seed(client, server)
        used = seed(client, server)
        if ends(d, abandoned) and phase(d, used) != "ended":
            print("abandoned, closed")  # noqa: T201
    with Decathlon(url) as d:
        assert ends(d, used), "the server's end does not close what is open"


main(*sys.argv[1:])
