"""Plug-ins: what an episode can do without, each in a module or folder here. Only `hooks` imports them.

`PLUGINS` says what each adds, and where; the parts are imported when they are used.
"""

from __future__ import annotations

from decathlon_mcp.hooks import Plugin

PLUGINS = (
    # Agent programs as players: `serve-episode`, `episode verdict`.
    Plugin(name="agents", commands=("decathlon_mcp.plugins.agents.commands:add_commands",)),
    # Tasks are played by policies that do not solve them: `audit`.
    Plugin(name="audit", commands=("decathlon_mcp.plugins.audit.commands:add_commands",)),
    # Episodes that begin where others stood: saved states, branches, and tasks that are set up once.
    Plugin(
        name="branches",
        settings="decathlon_mcp.plugins.branches:BranchSettings",
        episodes=("decathlon_mcp.plugins.branches.branches:create",),
        lobby_tools=(
            "decathlon_mcp.plugins.branches.branches:StartOrBranchEpisode",
            "decathlon_mcp.plugins.branches.branches:SnapshotEpisode",
        ),
        saved_states=("decathlon_mcp.plugins.branches.states:remove_states_of_ended",),
    ),
    # Servers on all nodes of a Ray cluster, behind one address. Ray Serve imports `cluster.ray:app`.
    Plugin(name="cluster", routes=("decathlon_mcp.plugins.cluster.held_episodes:create",)),
    # Tasks are drawn by the pass rates of the server's own episodes.
    Plugin(name="curriculum", pass_rates="decathlon_mcp.plugins.curriculum:live_rates"),
    # Sandboxes that are containers of a Docker engine.
    Plugin(
        name="docker",
        providers={"docker": "decathlon_mcp.plugins.docker.provider:PROVIDER"},
        image_provider="docker",
    ),
    # Episodes and tasks for other tools: `export`.
    Plugin(name="exports", commands=("decathlon_mcp.plugins.exports.commands:add_commands",)),
    # Sandboxes that each have a kernel of their own, gVisor's.
    Plugin(name="gvisor", kernels={"gvisor": "decathlon_mcp.plugins.gvisor.sandbox:GvisorSandbox"}),
    # The episodes and runs of state folders: `runs`, `show`.
    Plugin(
        name="history",
        commands=("decathlon_mcp.plugins.history.commands:add_commands",),
        columns=("decathlon_mcp.plugins.history.columns:columns_of",),
    ),
    # A suite to begin with: `init`.
    Plugin(name="init", commands=("decathlon_mcp.plugins.init:add_commands",)),
    # This server becomes an entry of a desktop program: `install`.
    Plugin(name="install", commands=("decathlon_mcp.plugins.install:add_commands",)),
    # Metrics for Prometheus: `/metrics`.
    Plugin(
        name="metrics",
        settings="decathlon_mcp.plugins.metrics:MetricSettings",
        listeners=("decathlon_mcp.plugins.metrics.metrics:create",),
        routes=("decathlon_mcp.plugins.metrics.endpoint:metrics_route",),
    ),
    # What people see in a browser, of a server and of state folders: the page of `serve`, and `view`.
    Plugin(
        name="page",
        commands=("decathlon_mcp.plugins.page.commands:add_commands",),
        page="decathlon_mcp.plugins.page.application:create_page",
    ),
    # Tokens, keys, signatures, leftovers of dead servers: `token`, `key`, `verify`, `gc`.
    Plugin(name="operate", commands=("decathlon_mcp.plugins.operate.commands:add_commands",)),
    # People play tasks: in a browser at the page's `/play`, or from a script. The command `play`.
    Plugin(name="play", commands=("decathlon_mcp.plugins.play.commands:add_commands",)),
    # Sandboxes that are containers of Podman.
    Plugin(name="podman", providers={"podman": "decathlon_mcp.plugins.podman:PROVIDER"}),
    # Sandboxes that are opened ahead, for the episodes that come next (`--pool`).
    Plugin(
        name="pool",
        settings="decathlon_mcp.plugins.pool:PoolSettings",
        sandbox_source="decathlon_mcp.plugins.pool.pool:create",
    ),
    # Python servers that start as forks of processes which have imported their libraries (`--preload`).
    Plugin(
        name="preload",
        settings="decathlon_mcp.plugins.preload:PreloadSettings",
        episodes=("decathlon_mcp.plugins.preload.preloads:create",),
    ),
    # Sandboxes on the machines of Prime Intellect.
    Plugin(name="prime", providers={"prime": "decathlon_mcp.plugins.prime.provider:PROVIDER"}),
    # Whether this machine is ready, and what each task lacks here: `doctor`, `tasks`.
    Plugin(
        name="readiness",
        commands=("decathlon_mcp.plugins.readiness.commands:add_commands",),
        readiness=("decathlon_mcp.plugins.readiness.machine:check_machine",),
    ),
    # Kept attempts are graded again with the evaluators of now: `regrade`.
    Plugin(
        name="regrade",
        settings="decathlon_mcp.plugins.regrade:KeepSettings",
        commands=("decathlon_mcp.plugins.regrade.commands:add_commands",),
        episodes=("decathlon_mcp.plugins.regrade.keeping:create",),
    ),
    # An episode's calls are made again in a new one, and compared: `replay`.
    Plugin(name="replay", commands=("decathlon_mcp.plugins.replay.commands:add_commands",)),
    # Files of episodes that ended long ago are deleted (`--keep-days`).
    Plugin(
        name="retention",
        settings="decathlon_mcp.plugins.retention:RetentionSettings",
        background=("decathlon_mcp.plugins.retention.retention:create",),
    ),
    # TCP connections to and from a sandbox's loopback, which `services` and `web` need.
    Plugin(name="tunnels", driver={"tunnels": "decathlon_mcp.plugins:inside_tunnels.py"}),
    # Services that a task reaches at ports of its sandbox: hosted ones, and one of its own for each episode.
    Plugin(name="services", services="decathlon_mcp.plugins.services:open_services"),
    # A shell plays an episode of a running server, one process per step: `episode`.
    Plugin(name="shell", commands=("decathlon_mcp.plugins.shell:add_commands",)),
    # Spans for OpenTelemetry: `--spans`.
    Plugin(
        name="spans",
        settings="decathlon_mcp.plugins.spans:SpanSettings",
        spans="decathlon_mcp.plugins.spans.spans:create",
    ),
    # Toolathlon's own: its profiles and releases, local tools, repaired arguments, and its evaluators' log.
    Plugin(
        name="toolathlon",
        profiles=("decathlon_mcp.plugins.toolathlon",),
        releases={"toolathlon": "decathlon_mcp.plugins.toolathlon.suite:find_release"},
        suites=("decathlon_mcp.plugins.toolathlon.suite:ToolathlonHooks",),
    ),
    # Signatures of verdicts are checked: `verify`.
    # Recorded web: a recording proxy for tasks that need the internet, and its recordings.
    Plugin(
        name="web",
        settings="decathlon_mcp.plugins.web.settings:WebSettings",
        commands=("decathlon_mcp.plugins.web.commands:add_commands",),
        web="decathlon_mcp.plugins.web.episodes:create",
        findings=("decathlon_mcp.plugins.web.proxy:check_program",),
        task_notes=("decathlon_mcp.plugins.web.episodes:recorded_note",),
    ),
)
