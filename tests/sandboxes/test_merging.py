"""Merging of pages: the seccomp profile, and what a process in a container may do with it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.driver.client import connect
from decathlon_mcp.plugins.docker.container import merging_profile
from decathlon_mcp.plugins.readiness.machine import check_merging
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.sandboxes.host.seccomp import FIXED_ADDRESSES
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio

DEFAULT_DIGEST = "7ce699efbba58df5691185a87189ecc0a47ff01c48ec8fc5708465954b672979"
"""Of the default profile in github.com/moby/profiles, seccomp/v0.1.0: SHA-256 of it as sorted JSON without
spaces."""


def test_the_profile_is_the_engines_default_with_one_value_added() -> None:
    profile = json.loads(merging_profile())
    profile["syscalls"].remove(
        {
            "names": ["personality"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": FIXED_ADDRESSES, "op": "SCMP_CMP_EQ"}],
        }
    )
    text = json.dumps(profile, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == DEFAULT_DIGEST


@pytest.mark.docker
async def test_only_processes_of_a_merging_container_may_fix_their_addresses(docker: Bench) -> None:
    for merge_pages in (False, True):
        spec = replace(docker.spec(), merge_pages=merge_pages)
        async with docker.provider.open(spec) as sandbox, connect(sandbox) as driver:
            options = docker.engine.inspect_container(f"decathlon-{spec.name}")["HostConfig"]["SecurityOpt"]
            result = await driver.run(["setarch", "-R", "true"], cwd="/", timeout_seconds=30)
            assert (result.exit_code == 0) is merge_pages, result
            assert [option.partition("=")[0] for option in options] == [
                "no-new-privileges:true",
                *(["seccomp"] if merge_pages else []),
            ]


async def test_doctor_says_how_to_switch_the_kernels_merging_on(tmp_path: Path) -> None:
    kernel = tmp_path / "ksm"
    kernel.mkdir()
    root = PurePosixPath("/decathlon")

    async def check(**values: int) -> tuple[bool, str, str]:
        for name, value in values.items():
            (kernel / name).write_text(f"{value}\n")
        async with HostProvider(f"test-{os.getpid()}", tmp_path / "sandboxes", isolation="none") as provider:
            thread, sandbox = await check_merging(provider, None, root, folder=kernel)
        # The kernel of the test's machine decides whether that setting survives.
        assert sandbox.what == "merging in a sandbox"
        return thread.ok, thread.detail, thread.cure

    ok, detail, cure = await check()
    assert (ok, "CONFIG_KSM" in cure) == (False, True), detail
    ok, detail, cure = await check(run=0, pages_to_scan=100, sleep_millisecs=20)
    assert (ok, detail) == (False, "it does not run")
    assert f"echo 1 > {kernel}/run; echo 5000 > {kernel}/pages_to_scan" in cure
    ok, detail, cure = await check(run=1)
    assert (ok, detail) == (False, "looks at up to 19 MiB of memory each second")
    assert await check(pages_to_scan=5000) == (True, "looks at up to 976 MiB of memory each second", "")
