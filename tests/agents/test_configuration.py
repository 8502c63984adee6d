"""Configurations of agent programs, the folders that programs need, and the addresses that they reach."""

from __future__ import annotations

import errno
import json
import socket
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import anyio
import anyio.to_thread
import pytest

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.agents.agent_programs import (
    MAX_ARGUMENT_BYTES,
    PRESETS,
    choose_variables,
    configure,
    find_program,
)
from decathlon_mcp.plugins.agents.launch import NamespaceLauncher
from decathlon_mcp.plugins.agents.reach import (
    MAX_CONNECTIONS,
    Endpoint,
    Reached,
    hosts_file,
    read_endpoints,
    relay_connections,
)

ADDRESS = "http://127.0.0.1:8765/mcp"
FOLDERS = PurePosixPath("/agent")
PROGRAM = Path(__file__).with_name("scripted_agent.py")


def test_every_program_gets_the_episode_with_time_for_slow_tools() -> None:
    files = configure(["x"], FOLDERS, address=ADDRESS, prompt="Do it.", tool_seconds=3600, variables={}).files
    codex = tomllib.loads(files["/agent/configuration/codex/config.toml"])
    opencode = json.loads(files["/agent/configuration/opencode.json"])
    gemini = json.loads(files["/agent/home/.gemini/settings.json"])
    servers = [
        json.loads(files["/agent/configuration/mcp.json"])["mcpServers"]["task"]["url"],
        codex["mcp_servers"]["task"]["url"],
        opencode["mcp"]["task"]["url"],
        gemini["mcpServers"]["task"]["httpUrl"],
    ]
    assert servers == [ADDRESS] * 4
    assert codex["mcp_servers"]["task"]["tool_timeout_sec"] == 3600
    assert opencode["mcp"]["task"]["timeout"] == gemini["mcpServers"]["task"]["timeout"] == 3_600_000
    assert not codex["features"]["shell_tool"]
    assert not opencode["tools"]["bash"]
    assert "run_shell_command" in gemini["tools"]["exclude"]
    claude = json.loads(files["/agent/configuration/claude/settings.json"])
    assert "Bash" in claude["permissions"]["deny"]
    assert files["/agent/configuration/prompt.txt"] == "Do it."


def test_placeholders_in_a_prompt_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://models.test/v1")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/.config")
    prompt = "Explain {address}."
    command = ["run", "-p={prompt}", "{address}"]
    variables, _ = choose_variables("run", [])
    made = configure(command, FOLDERS, address=ADDRESS, prompt=prompt, tool_seconds=1, variables=variables)
    assert made.command == ["run", "-p=Explain {address}.", ADDRESS]
    assert made.environment["DECATHLON_PROMPT"] == prompt
    assert "XDG_CONFIG_HOME" not in made.environment
    codex = tomllib.loads(made.files["/agent/configuration/codex/config.toml"])
    assert codex["openai_base_url"] == "http://models.test/v1"
    prompt = "é" * (MAX_ARGUMENT_BYTES // 2 + 1)
    with pytest.raises(BadRequestError, match="no argument of a program can have"):
        configure(["x"], FOLDERS, address=ADDRESS, prompt=prompt, tool_seconds=1, variables={})


def test_page_lists_the_variables_that_each_known_program_gets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agent-programs.md").read_text("utf-8")
    for program, preset in PRESETS.items():
        assert f"| `{program}` | {', '.join(f'`{prefix}`' for prefix in preset.variables)} |\n" in page


def test_a_program_gets_the_key_of_its_own_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        "claude": "ANTHROPIC_API_KEY",
        "codex": "CODEX_API_KEY",
        "opencode": "OPENROUTER_API_KEY",
        "gemini": "GEMINI_API_KEY",
        "other": "A_BASE_URL",
    }
    others = {"GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DECATHLON_TOKEN", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR"}
    monkeypatch.setattr("os.environ", dict.fromkeys({*keys.values(), *others, "HOME", "LC_ALL"}, "a value"))
    for program, key in keys.items():
        passed, withheld = choose_variables(program, [])
        assert {key, "LC_ALL"} <= passed.keys()
        assert not others & passed.keys()
        assert others <= set(withheld)
        assert "HOME" not in {*passed, *withheld}
        if program in ("claude", "codex", "gemini"):
            assert passed.keys() == {key, "LC_ALL"}


def test_script_of_an_npm_package_needs_all_packages_and_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, package = tmp_path / "node" / "bin", tmp_path / "lib" / "node_modules" / "agent"
    for folder in (node, package, tmp_path / "bin"):
        folder.mkdir(parents=True)
    for file, text in ((node / "node", "#!/bin/sh\n"), (package / "cli.js", "#!/usr/bin/env node\n")):
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / "bin" / "agent").symlink_to(package / "cli.js")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{node}:/usr/bin:/bin")
    program = find_program(["agent", "-p"], isolated=True)
    assert program.name == "agent"
    assert program.command == (str(package / "cli.js"), "-p")
    assert program.folders == (package.parent, node)
    assert node in program.path
    with pytest.raises(BadRequestError, match="which is hidden from it"):
        find_program(["agent"], hidden=[tmp_path / "lib"], isolated=True)


def test_model_is_that_of_the_options_or_the_variables_or_the_program() -> None:
    assert read_endpoints([], "claude", {}) == [Endpoint("api.anthropic.com", 443, "127.0.1.1")]
    variables = {"ANTHROPIC_BASE_URL": "http://localhost:9000", "A_BASE_URL": "http://10.0.0.5"}
    assert read_endpoints([], "claude", variables) == [
        Endpoint("localhost", 9000, "127.0.0.1"),
        Endpoint("10.0.0.5", 80, "10.0.0.5"),
    ]
    endpoints = read_endpoints(
        ["https://b.test/v1", "https://a.test", "http://b.test:8000"], "claude", variables
    )
    assert endpoints == [
        Endpoint("b.test", 443, "127.0.1.2"),
        Endpoint("a.test", 443, "127.0.1.1"),
        Endpoint("b.test", 8000, "127.0.1.2"),
    ]
    assert hosts_file(endpoints).decode().splitlines() == [
        "127.0.0.1\tlocalhost",
        "::1\tlocalhost",
        "127.0.1.1\ta.test",
        "127.0.1.2\tb.test",
    ]


def test_only_an_endpoint_that_took_no_connection_was_not_reached() -> None:
    here, there = Endpoint("a.test", 443, "127.0.1.1"), Endpoint("b.test", 443, "127.0.1.2")
    reached = Reached()
    # What a program can cause by many connections says nothing about the endpoint.
    for number in (errno.EMFILE, errno.EADDRNOTAVAIL):
        reached.add(here, OSError(number, "of this process"))
        several = OSError("all attempts failed")
        several.__cause__ = ExceptionGroup("attempts", [OSError(errno.ECONNREFUSED, ""), OSError(number, "")])
        reached.add(here, several)
    assert reached.why_not == ""
    reached.add(here, OSError(errno.ECONNREFUSED, "refused"))
    reached.add(there, TimeoutError())
    assert reached.why_not == "a.test:443: [Errno 111] refused; b.test:443: no answer within 20 s"
    reached.add(here)
    assert reached.why_not == "b.test:443: no answer within 20 s"
    reached.add(there)
    reached.add(there, TimeoutError())
    assert reached.why_not == ""


def open_descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


@pytest.mark.anyio
async def test_connections_that_wait_for_their_turn_take_no_descriptors_of_the_server() -> None:
    """A thousand of them ended the attempt without a verdict, so that a program could choose its attempts."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=256) as model,
        socket.create_server(("127.0.0.1", 0), backlog=256) as listener,
        ExitStack() as stack,
    ):
        listener.setblocking(False)
        endpoint = Endpoint("127.0.0.1", model.getsockname()[1], "127.0.0.1")
        clients: list[socket.socket] = []
        for _ in range(2 * MAX_CONNECTIONS):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            clients.append(client)
        reached, before = Reached(), len(open_descriptors())
        async with background_tasks() as tasks:
            tasks.start_soon(relay_connections, listener, endpoint, reached)
            targets = [
                stack.enter_context((await anyio.to_thread.run_sync(model.accept))[0])
                for _ in range(MAX_CONNECTIONS)
            ]
            # Each has two of the server's descriptors and the model's own, which is in this process too.
            assert len(open_descriptors()) <= before + 3 * MAX_CONNECTIONS + 10
            for client, target in zip(clients, targets, strict=False):
                client.close()
                target.close()
            stack.enter_context((await anyio.to_thread.run_sync(model.accept))[0])
        assert reached.why_not == ""


@pytest.mark.anyio
@pytest.mark.usefixtures("namespaces")
async def test_names_and_addresses_of_others_lead_to_this_process() -> None:
    urls = ("http://models.test:443/", "http://10.9.8.7:80/")
    command = [sys.executable, str(PROGRAM), "post", urls[0], "post", urls[1], "list", "/proc/self/fd"]
    program = find_program(command, shown=[PROGRAM.parent], isolated=True)
    endpoints = [Endpoint("models.test", 443, "127.0.1.1"), Endpoint("10.9.8.7", 80, "10.9.8.7")]
    launcher = NamespaceLauncher(program, endpoints, [])
    with launcher.location() as location:
        made = configure(
            program.command,
            location.root,
            address=location.address,
            prompt="",
            tool_seconds=1,
            variables={},
        )
        async with launcher.start(location, made) as running:
            for listener in running.listeners[1:]:
                await anyio.to_thread.run_sync(_answer, listener)
            output = b"".join([chunk async for chunk in running.output]).decode()
            assert await running.wait() == 0
    *answers, files = output.splitlines()
    assert answers == ["200 the model"] * 2
    assert len(json.loads(files)["/proc/self/fd"]) <= 4  # no descriptor of this process


def _answer(listener: socket.socket) -> None:
    """Answer one request."""
    listener.settimeout(60)
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nthe model")
        connection.shutdown(socket.SHUT_WR)
        connection.recv(65536)
