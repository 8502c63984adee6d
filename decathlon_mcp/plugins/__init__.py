"""Plug-ins: parts that an episode can do without, each in a module or folder here. Only `hooks` imports them.

`PLUGINS` says what each adds, and where; the parts are imported when they are used.
"""

from __future__ import annotations

from decathlon_mcp.hooks import Command, Plugin

PLUGINS = (
    # Agent programs as players: `serve-episode`, `episode verdict`.
    Plugin(
        name="agents",
        commands={
            "run": Command(
                "decathlon_mcp.plugins.agents.commands:run",
                "Let an agent play tasks, and show how often it succeeds.",
                runs_program=True,
            ),
            "serve-episode": Command(
                "decathlon_mcp.plugins.agents.serving:serve_episode",
                "Serve one episode at an address for playing only.",
            ),
            "episode verdict": Command(
                "decathlon_mcp.plugins.agents.serving:verdict",
                "Grade the episode that `serve-episode TASK` serves, and print its verdict.",
            ),
        },
    ),
    # Tasks are played by policies that do not solve them: `audit`.
    Plugin(
        name="audit",
        commands={
            "audit": Command(
                "decathlon_mcp.plugins.audit.commands:audit",
                "Find tasks that pay for nothing, can be forged, leak or are unsteady.",
            ),
        },
    ),
    # Episodes that begin where others stood: saved states, branches, and tasks that are set up once.
    Plugin(
        name="branches",
        settings="decathlon_mcp.plugins.settings:BranchSettings",
        episodes=("decathlon_mcp.plugins.branches.branches:create",),
        lobby_tools=(
            "decathlon_mcp.plugins.branches.branches:StartOrBranchEpisode",
            "decathlon_mcp.plugins.branches.branches:SnapshotEpisode",
        ),
    ),
    # Servers on all nodes of a Ray cluster, behind one address. Ray Serve imports `cluster.ray:app`.
    Plugin(name="cluster", routes=("decathlon_mcp.plugins.cluster.held_episodes:create",)),
    # Access tokens, the key of the server, and signatures of verdicts.
    Plugin(
        name="credentials",
        commands={
            "token": Command(
                "decathlon_mcp.plugins.credentials:token",
                "Create a token for a client of `serve --tokens`.",
            ),
            "key": Command(
                "decathlon_mcp.plugins.credentials:key",
                "Print the public key that verdicts are signed with.",
            ),
            "verify": Command(
                "decathlon_mcp.plugins.credentials:verify",
                "Check the signatures of verdicts.",
            ),
        },
    ),
    # Tasks are drawn by the pass rates of the server's own episodes.
    Plugin(name="curriculum", pass_rates="decathlon_mcp.plugins.curriculum:live_rates"),
    # Sandboxes that are containers of a Docker engine.
    Plugin(
        name="docker",
        providers={"docker": "decathlon_mcp.plugins.docker.provider:PROVIDER"},
        image_provider="docker",
    ),
    # Episodes and tasks for other tools: `export`.
    Plugin(
        name="exports",
        commands={
            "export": Command(
                "decathlon_mcp.plugins.exports.export:export",
                "Write episodes or tasks for other tools.",
            ),
        },
    ),
    # Leftovers of dead servers.
    Plugin(
        name="gc",
        commands={
            "gc": Command(
                "decathlon_mcp.plugins.gc:gc",
                "Remove the leftovers of crashed servers.",
            ),
        },
    ),
    # Sandboxes that each have a kernel of their own, gVisor's.
    Plugin(name="gvisor", kernels={"gvisor": "decathlon_mcp.plugins.gvisor.sandbox:GvisorSandbox"}),
    # The episodes and runs of state folders: `runs`, `show`.
    Plugin(
        name="history",
        commands={
            "runs": Command(
                "decathlon_mcp.plugins.history.list_runs:runs",
                "List runs, show the numbers of one, or compare two.",
            ),
            "show": Command(
                "decathlon_mcp.plugins.history.list_episodes:show",
                "List episodes, or show everything that is kept of one.",
            ),
        },
        columns=("decathlon_mcp.plugins.history.columns:columns_of",),
    ),
    # A suite to begin with: `init`.
    Plugin(
        name="init",
        commands={
            "init": Command(
                "decathlon_mcp.plugins.init:init",
                "Create a suite of your own, with a task, a server and a test.",
            ),
        },
    ),
    # This server becomes an entry of a desktop program: `install`.
    Plugin(
        name="install",
        commands={
            "install": Command(
                "decathlon_mcp.plugins.install:install",
                "Add this server to a desktop program that people play from.",
            ),
        },
    ),
    # Metrics for Prometheus: `/metrics`.
    Plugin(
        name="metrics",
        settings="decathlon_mcp.plugins.settings:MetricSettings",
        listeners=("decathlon_mcp.plugins.metrics:create",),
        routes=("decathlon_mcp.plugins.metrics:metrics_route",),
    ),
    # What people see in a browser, of a server and of state folders: the page of `serve`, and `view`.
    Plugin(
        name="page",
        commands={
            "view": Command(
                "decathlon_mcp.plugins.page.page:view",
                "Show runs and episodes in a browser, without a server.",
            ),
        },
        page="decathlon_mcp.plugins.page.page:create_page",
    ),
    # People play tasks: in a browser at the page's `/play`, or from a script. The command `play`.
    Plugin(
        name="play",
        commands={
            "play": Command(
                "decathlon_mcp.plugins.play:play",
                "Play a task by hand in a browser, or from a file of calls.",
            ),
        },
    ),
    # Sandboxes that are containers of Podman.
    Plugin(name="podman", providers={"podman": "decathlon_mcp.plugins.podman:PROVIDER"}),
    # Sandboxes that are opened ahead, for the episodes that come next (`--pool`).
    Plugin(
        name="pool",
        settings="decathlon_mcp.plugins.settings:PoolSettings",
        sandbox_source="decathlon_mcp.plugins.pool:create",
    ),
    # Python servers that start as forks of processes which have imported their libraries (`--preload`).
    Plugin(
        name="preload",
        settings="decathlon_mcp.plugins.settings:PreloadSettings",
        episodes=("decathlon_mcp.plugins.preload.preloads:create",),
    ),
    # Sandboxes on the machines of Prime Intellect.
    Plugin(name="prime", providers={"prime": "decathlon_mcp.plugins.prime.provider:PROVIDER"}),
    # Whether this machine is ready, and what each task lacks here: `doctor`, `tasks`.
    Plugin(
        name="readiness",
        commands={
            "doctor": Command(
                "decathlon_mcp.plugins.readiness.doctor:doctor",
                "Check this machine, and say how to fix what is not ready.",
            ),
            "tasks": Command(
                "decathlon_mcp.plugins.readiness.list_tasks:tasks",
                "List the tasks, their needs, and whether they can run here.",
            ),
        },
        readiness=("decathlon_mcp.plugins.readiness.machine:check_machine",),
    ),
    # Kept attempts are graded again with the evaluators of now: `regrade`.
    Plugin(
        name="regrade",
        settings="decathlon_mcp.plugins.settings:KeepSettings",
        commands={
            "regrade": Command(
                "decathlon_mcp.plugins.regrade.regrade:regrade",
                "Grade kept attempts again with the current evaluators.",
            ),
        },
        episodes=("decathlon_mcp.plugins.regrade.kept_attempts:create",),
    ),
    # An episode's calls are made again in a new one, and compared: `replay`.
    Plugin(
        name="replay",
        commands={
            "replay": Command(
                "decathlon_mcp.plugins.replay:replay",
                "Repeat an episode's calls, and show which replies differ.",
            ),
        },
    ),
    # Files of episodes that ended long ago are deleted (`--keep-days`).
    Plugin(
        name="retention",
        settings="decathlon_mcp.plugins.settings:RetentionSettings",
        background=("decathlon_mcp.plugins.retention:create",),
    ),
    # TCP connections to and from a sandbox's loopback, which `services` and `web` need.
    Plugin(name="tunnels", driver={"tunnels": "decathlon_mcp.plugins:inside_tunnels.py"}),
    # Services that a task reaches at ports of its sandbox: hosted, or started for each episode.
    Plugin(name="services", services="decathlon_mcp.plugins.services:open_services"),
    # A shell plays an episode of a running server, one process per step: `episode`.
    Plugin(
        name="shell",
        commands={
            "episode": Command(
                "decathlon_mcp.plugins.shell:episode",
                "Play an episode of a running server from a shell, one process per step.",
            ),
        },
    ),
    # Spans for OpenTelemetry: `--spans`.
    Plugin(
        name="spans",
        settings="decathlon_mcp.plugins.settings:SpanSettings",
        spans="decathlon_mcp.plugins.spans:create",
    ),
    # Toolathlon's own: its profiles and releases, local tools, repaired arguments, and its evaluators' log.
    Plugin(
        name="toolathlon",
        profiles=("decathlon_mcp.plugins.toolathlon",),
        releases={"toolathlon": "decathlon_mcp.plugins.toolathlon.toolathlon:find_release"},
        suites=("decathlon_mcp.plugins.toolathlon.toolathlon:ToolathlonHooks",),
    ),
    # Recorded web: a recording proxy for tasks that need the internet, and its recordings.
    Plugin(
        name="web",
        settings="decathlon_mcp.plugins.settings:WebSettings",
        commands={
            "recordings": Command(
                "decathlon_mcp.plugins.web.commands:recordings",
                "List, show, prune, compare and export recordings of the web.",
            ),
        },
        web="decathlon_mcp.plugins.web.recorded_web:create",
        findings=("decathlon_mcp.plugins.web.proxy:check_program",),
        task_notes=("decathlon_mcp.plugins.web.recorded_web:recorded_note",),
    ),
)
