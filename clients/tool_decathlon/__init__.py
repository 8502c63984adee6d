"""Toolathlon as a training environment.

    from tool_decathlon import ToolDecathlonEnv

    async with ToolDecathlonEnv() as env:
        async with env.episode(env.sample(split="train")) as e:
            print(e.prompt, e.tools)
            await e.claim_done("…")
            print((await e.evaluate()).reward)

`load_environment` is for verifiers, which also finds this package by its name: `vf-eval tool-decathlon`.
Names are loaded when they are first used: `ToolDecathlonEnv` needs no verifiers, and neither needs a server.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from decathlon_client.adapters.verifiers import (
        ToolDecathlonHarness,
        ToolDecathlonTaskset,
        VerifiersEnv,
        load_environment,
    )

    from tool_decathlon.env import ToolDecathlonEnv

_MODULES = {
    "ToolDecathlonEnv": "tool_decathlon.env",
    "ToolDecathlonHarness": "decathlon_client.adapters.verifiers",
    "ToolDecathlonTaskset": "decathlon_client.adapters.verifiers",
    "VerifiersEnv": "decathlon_client.adapters.verifiers",
    "load_environment": "decathlon_client.adapters.verifiers",
}
"""The module of each name. verifiers looks through `__all__` for a subclass of its `Env`: `VerifiersEnv`."""


def __getattr__(name: str) -> object:
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "ToolDecathlonEnv",
    "ToolDecathlonHarness",
    "ToolDecathlonTaskset",
    "VerifiersEnv",
    "load_environment",
]
