"""Recorded web: a recording proxy for tasks that need the internet, and its recordings.

`addon` runs inside `mitmdump`, a program of its own with an environment of its own. It and the modules that
it imports (such as `session`, `connections` and `recording`) use the standard library only, and the
package mitmproxy. `proxy` is the server's side.
"""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="web",
    settings="decathlon_mcp.plugins.web.settings:WebSettings",
    commands=("decathlon_mcp.plugins.web.commands:add_commands",),
    web="decathlon_mcp.plugins.web.episodes:create",
    findings=("decathlon_mcp.plugins.web.proxy:check_program",),
    task_notes=("decathlon_mcp.plugins.web.task_recordings:recorded_note",),
)
