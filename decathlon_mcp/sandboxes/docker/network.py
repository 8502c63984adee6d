"""The engine's network that sandboxes are in which may go out: each by itself, none reaches another.

Docker's own, `bridge`, lets its containers reach each other: an agent could find the sandboxes of others by
their addresses. On ours the engine's firewall drops what one says to another (`enable_icc`). It is made when
it is first needed, and stays: several servers share it.
"""

from __future__ import annotations

import threading
from typing import Any, cast

from docker.errors import APIError, NotFound

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.docker.engine import Api, said_by
from decathlon_mcp.types import JsonObject

DEFAULT_NETWORK = "decathlon"
LABEL = "decathlon.network"
_MTU = "com.docker.network.driver.mtu"
_ALONE = {
    "com.docker.network.bridge.enable_icc": "false",
    "com.docker.network.bridge.enable_ip_masquerade": "true",
}
_making = threading.Lock()


def default_network(api: Api) -> str:
    """The id of the network; made where there is none. Raises ProviderUnavailableError."""
    with _making:
        try:
            return _oldest(api) or _make(api)
        except APIError as error:
            raise ProviderUnavailableError(
                f"the engine made no network for sandboxes: {said_by(error)}; make one by hand and name it "
                "with --docker-network",
            ) from error


def _oldest(api: Api) -> str | None:
    """Servers that begin at once may each make one: the engine allows several of one name."""
    found = api.networks(names=[DEFAULT_NETWORK], filters={"label": LABEL})
    ours = [each for each in found if each["Name"] == DEFAULT_NETWORK]
    return min(((str(each["Created"]), str(each["Id"])) for each in ours), default=("", None))[1]


def _make(api: Api) -> str:
    made = api.create_network(
        DEFAULT_NETWORK, driver="bridge", options={**_ALONE, **_mtu(api)}, labels={LABEL: "1"}
    )["Id"]
    oldest = _oldest(api)
    if oldest is None or oldest == made:
        return str(made)
    api.remove_network(made)
    return oldest


def _mtu(api: Api) -> dict[str, str]:
    """That of the engine's own network: on one that is made it says 1500, whatever lies below."""
    try:
        bridge = api.inspect_network("bridge")
    except NotFound:
        return {}
    options = cast("JsonObject", bridge.get("Options") or {})
    mtu: Any = options.get(_MTU)
    return {_MTU: str(mtu)} if mtu else {}
