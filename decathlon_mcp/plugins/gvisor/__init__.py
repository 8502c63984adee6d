"""Sandboxes that each have a kernel of their own, gVisor's."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="gvisor", kernels={"gvisor": "decathlon_mcp.plugins.gvisor.sandbox:GvisorSandbox"})
