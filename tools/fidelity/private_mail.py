"""A mail server for every episode, as Toolathlon's mail tasks need.

`pytest tools/fidelity/private_mail.py` builds the image of images/mail, which takes a minute, so it is not
collected by default. Requires a Docker engine, the tests' image and Debian's registry.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.docker.image import STARTER_IMAGE
from decathlon_mcp.suites.profile import packaged_profiles
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving
from tools.fidelity.services_suite import copy_suite

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(600)]

PROJECT = Path(__file__).parents[2]
IMAGE = "decathlon-test-mail:latest"
USERS = {"ann@mcp.com": "ann$:1%", "bob@mcp.com": "bob 2"}
MAIL = '''
"""What upstream's scripts do with imaplib and smtplib; prints the result or the server's error."""
import imaplib, smtplib, sys
from email.message import EmailMessage

def send(to, subject, login="ann@mcp.com", password="ann$:1%", port=1587):
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "ann@mcp.com", to, subject
    message.set_content("A line.\\\\n.\\\\nAnother.")
    with smtplib.SMTP("localhost", int(port), timeout=30) as server:
        try:
            if login:
                server.login(login, password)
            server.send_message(message)
        except smtplib.SMTPRecipientsRefused as error:
            return "refused %d" % next(iter(error.recipients.values()))[0]
        except smtplib.SMTPResponseException as error:
            return "refused %d" % error.smtp_code
    return "sent"

def subjects(user="bob@mcp.com", password="bob 2", header="SUBJECT"):
    with imaplib.IMAP4("localhost", 1143) as server:
        server.login(user, password)
        server.select("INBOX")
        numbers = server.search(None, "ALL")[1][0].split()
        field = f"(BODY[HEADER.FIELDS ({header})])"
        headers = [server.fetch(number, field)[1][0][1].decode() for number in numbers]
    return " ".join(text.partition(":")[2].strip() for text in headers)

if __name__ == "__main__":
    print({"send": send, "subjects": subjects}[sys.argv[1]](*sys.argv[2:]))
'''
PREPROCESS = """
from utils.mail import send
assert send("bob@mcp.com", "welcome") == "sent"
"""
EVALUATION = """
import sys
from utils.mail import subjects
print(subjects())
sys.exit(0 if subjects() == "welcome report" else 1)
"""


@pytest.fixture(scope="module")
def image(test_image: str) -> str:
    base = os.environ.get("BASE", STARTER_IMAGE)
    subprocess.run([PROJECT / "images/mail/build", IMAGE], check=True, env={**os.environ, "BASE": base})
    return IMAGE


@pytest.fixture(scope="module")
async def served(
    image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """Serve the probe suite with a task that has private mail, configured as in the profile `toolathlon`."""
    suite = copy_suite(
        tmp_path_factory.mktemp("suites"),
        "mailing",
        preprocess=PREPROCESS,
        evaluation=EVALUATION,
        utils={"mail.py": MAIL},
    )
    users = [{"email": email, "password": password} for email, password in USERS.items()]
    (suite / "configs/users_data.json").write_text(json.dumps({"users": users}))
    profile = packaged_profiles()["toolathlon"]
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    private = {**profile["services"]["poste"]["private"], "image": image}
    settings["services"] = {"poste": {**profile["services"]["poste"], "private": private}}
    settings["tasks"]["mailing"] = {"services": ["poste"]}
    (suite / "suite.yaml").write_text(json.dumps(settings))
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider="docker") as served:
        yield served


async def mail(player: Player, *arguments: str) -> str:
    words = " ".join(f"'{argument}'" for argument in arguments)
    return (await player.text("probe__shell", command=f"python3 ../utils/mail.py {words}")).strip()


def containers(engine: Any, label: str) -> list[str]:
    """Names of the containers of an episode."""
    return [name for item in engine.containers(all=True) for name in item["Names"] if label in name]


async def claim_and_evaluate(player: Player) -> dict[str, Any]:
    await player.call("claim_done")
    return (await player.call("evaluate")).structured_content


async def test_episodes_side_by_side_have_mailboxes_of_their_own_that_their_evaluator_sees(
    served: Served, docker_engine: Any
) -> None:
    async with playing(served, "mailing", "task") as one, playing(served, "mailing", "task") as other:
        assert await mail(one, "send", "bob@mcp.com", "report") == "sent"
        assert await mail(one, "subjects") == "welcome report", "delivered when the command returns"
        assert await mail(other, "subjects") == "welcome"
        correct, empty = await claim_and_evaluate(one), await claim_and_evaluate(other)
    assert (correct["status"], correct["reward"], correct["agent_network"]) == ("scored", 1, "none"), correct
    assert (empty["status"], empty["reward"]) == ("scored", 0)
    assert empty["evaluator_output"].strip() == "welcome"


async def test_the_server_refuses_what_poste_refuses(served: Served) -> None:
    async with playing(served, "mailing", "task") as player:
        assert await mail(player, "send", "nobody@mcp.com", "x") == "refused 550"
        assert await mail(player, "send", "bob@mcp.com", "x", "ann@mcp.com", "guess") == "refused 535"
        assert await mail(player, "send", "someone@example.org", "x", "", "", "2525") == "refused 550"
        assert await mail(player, "send", "someone@example.org", "x") == "sent", "to nowhere"
        assert await mail(player, "send", "bob@mcp.com", "plain", "", "", "2525") == "sent"
        assert await mail(player, "send", "bob@mcp.com", "submitted", "") == "sent"
        assert await mail(player, "subjects") == "welcome plain submitted"
        assert "+0000" in await mail(player, "subjects", "bob@mcp.com", "bob 2", "DATE"), "added when missing"


async def test_nothing_is_left_of_a_closed_episode(served: Served, docker_engine: Any) -> None:
    async with playing(served, "mailing", "task") as player:
        await player.text("probe__echo", text="ready")
        episode = served.find(player.episode_id)
        assert containers(docker_engine, episode.spec.public_id)
    await episode.state.reach(Phase.ENDED)
    with anyio.fail_after(30):
        while containers(docker_engine, episode.spec.public_id):  # noqa: ASYNC110
            await anyio.sleep(0.05)
