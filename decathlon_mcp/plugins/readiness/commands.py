"""`doctor` and `tasks`, as the command line has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    EPILOGUE,
    NO_FILTERS,
    SANDBOX_SETTINGS,
    Filters,
    Flag,
    Host,
    Port,
    run_async,
    settings_model,
)
from decathlon_mcp.cli.usage import check_positive
from decathlon_mcp.errors import BadRequestError

TasksOptions = settings_model(
    "TasksOptions", (*SANDBOX_SETTINGS, "language", "results", "network"), like="tasks"
)
DoctorOptions = settings_model("DoctorOptions", (*SANDBOX_SETTINGS, "merge_pages", "tokens"), like="doctor")
TasksSettings = Annotated[TasksOptions, Parameter(name="*")]
DoctorSettings = Annotated[DoctorOptions, Parameter(name="*")]
TASKS_DEFAULTS = TasksOptions.model_validate({})
DOCTOR_DEFAULTS = DoctorOptions.model_validate({})


def add_commands(app: App) -> None:
    app.command(tasks, help_epilogue=EPILOGUE)
    app.command(doctor, help_epilogue=EPILOGUE)


def tasks(
    *,
    sample: Annotated[int | None, Parameter(metavar="N", validator=check_positive)] = None,
    check: Flag = False,
    conflicts: Flag = False,
    json: Flag = False,
    filters: Filters = NO_FILTERS,
    settings: TasksSettings = TASKS_DEFAULTS,
) -> int:
    """List the tasks, what each one needs, and whether it can run here.

    Parameters
    ----------
    sample
        Draw this many of the tasks that can run here.
    check
        Also look into a sandbox and show what each task lacks. Exit status 0 only if nothing is missing.
    conflicts
        List the accounts and conflict groups that tasks share instead.
    json
        Print `{"tasks": [...]}`.
    """
    from decathlon_mcp.plugins.readiness.tasks import check_tasks, show_conflicts, show_tasks

    if conflicts:
        return show_conflicts(settings, filters, as_json=json)
    if sample is None and filters.seed is not None:
        raise BadRequestError("--seed requires --sample")
    if check and sample is not None:
        raise BadRequestError("--sample and --check cannot be combined: --sample draws only runnable tasks")
    if check:
        return run_async(check_tasks, settings, filters, json)
    return show_tasks(settings, filters, sample=sample, as_json=json)


def doctor(
    *,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    unpack: Annotated[
        tuple[str, Path] | None, Parameter(metavar="IMAGE DIR", env_var=(), negative=())
    ] = None,
    json: Flag = False,
    settings: DoctorSettings = DOCTOR_DEFAULTS,
) -> int:
    """Check whether this machine is ready, and say how to fix what is not.

    Parameters
    ----------
    unpack
        Write an image's files and configuration into a folder that is empty or missing, for `--provider host
        --image DIR`, and do nothing else. Only `--unpack` needs a Docker engine. If you are root, the files
        get an owner without an account, and sandboxes run as this owner; otherwise the files are yours.
    host
        Address that `serve` would listen on.
    port
        Port that `serve` would listen on.
    json
        Print `{"ready": ..., "findings": [...]}`.
    """
    if unpack is not None:
        from decathlon_mcp.plugins.docker.unpacking import unpack_for_host

        return run_async(unpack_for_host, unpack[0], unpack[1].absolute())
    from decathlon_mcp.plugins.readiness.doctor import doctor

    return run_async(doctor, settings, host, port, json)
