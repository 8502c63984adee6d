"""The package by which verifiers finds its adapter: `vf-eval tool-decathlon`."""

from decathlon_client.adapters.verifiers import (
    ToolDecathlonEnv,
    ToolDecathlonHarness,
    ToolDecathlonTaskset,
    load_environment,
)

__all__ = ["ToolDecathlonEnv", "ToolDecathlonHarness", "ToolDecathlonTaskset", "load_environment"]
