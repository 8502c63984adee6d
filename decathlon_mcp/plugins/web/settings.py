"""The settings of the recorded web."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from decathlon_mcp.plugins.web.exchanges import Mode
from decathlon_mcp.settings import Count, PluginSettings


class WebSettings(PluginSettings):
    """What sandboxes get in place of a network, and how the recording proxy reaches the sites."""

    section: ClassVar[str] = "Sandboxes"
    listed_by: ClassVar[Mapping[str, Collection[str]]] = {"tasks": ("web",), "doctor": ("web", "web_proxy")}

    web: Mode | None = Field(
        None,
        description="A recorded web instead of a network, for tasks that need the internet. `record`: pass "
        "requests to the sites and store the responses. `replay`: answer from the task's recording only. "
        "`replay-or-record`: ask the sites for what the recording does not have.",
    )
    web_proxy: Path | None = Field(
        None, description="The program `mitmdump`. [installed by `make mitmproxy`, else on the PATH]"
    )
    web_address: tuple[str, ...] = Field(
        (),
        description="HOST=ADDRESS, both with an optional port: where the recorded web finds a host, such as "
        "a mirror or one without a public address. Can be given more than once.",
    )
    web_authorities: Path | None = Field(
        None,
        description="PEM file of the authorities by which the recorded web checks the certificates of sites. "
        "[mitmproxy's own list]",
    )
    web_response_mib: Count = Field(
        32, description="Largest response that is recorded, in MiB. `record` passes larger responses on."
    )
    web_recording_mib: Count = Field(1024, description="Largest recording of a task, in MiB.")
