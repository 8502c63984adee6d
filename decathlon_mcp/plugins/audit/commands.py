"""The command `audit` with its options."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, cast

from cyclopts import Parameter

from decathlon_mcp.cli.options import (
    SANDBOX_SETTINGS,
    run_async,
    settings_model,
)
from decathlon_mcp.cli.usage import check_positive, check_run
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.audit.report import DEFAULT_POLICIES, POLICIES, Policy, Report
from decathlon_mcp.settings import default_state

AuditSettings_ = settings_model(
    "AuditSettings", (*SANDBOX_SETTINGS, "web", "network", "language", "memory_mib", "max_sandboxes")
)
AuditSettings = Annotated[AuditSettings_, Parameter(name="*")]
AUDIT_DEFAULTS = AuditSettings_.model_validate({})


def audit(
    words: Annotated[tuple[str, ...], Parameter(name="TASK", negative=())] = (),
    /,
    *,
    policies: Annotated[
        tuple[Policy, ...],
        Parameter(negative=(), show_default=False, consume_multiple=False, env_var=()),
    ] = (),
    search: Annotated[int, Parameter(metavar="N", env_var=())] = 0,
    jobs: Annotated[int, Parameter(metavar="N", validator=check_positive, env_var=())] = 2,
    run: Annotated[str | None, Parameter(metavar="NAME", validator=check_run, env_var=())] = None,
    json: Annotated[Path | None, Parameter(metavar="FILE", env_var=())] = None,
    split: Annotated[str | None, Parameter(metavar="NAME", env_var=())] = None,
    settings: AuditSettings = AUDIT_DEFAULTS,
) -> int:
    """Find tasks that pay for nothing, can be forged, leak or are unsteady.

    Policies play the tasks without solving them. Exit status 1 if a task has a finding. What was played
    before an interrupt is not played again.

    Parameters
    ----------
    words
        Tasks by their ids; without one, all that can run here.
    split
        Only tasks of this split.
    policies
        What is tried. Can be repeated. [all but search]
    search
        Also climb from random to better calls, where the reward is dense, with so many attempts.
    jobs
        Attempts at once.
    run
        Name of the run that the attempts belong to. [one for these files of the suites]
    json
        File that gets everything that was found, as JSON.
    """
    from decathlon_mcp.plugins.audit.audit import AuditOptions, audit

    named: list[Policy] = [name for name in POLICIES if name in policies]
    chosen = tuple(named) if policies else DEFAULT_POLICIES
    if search < 0 or ("search" in chosen and not search):
        raise BadRequestError("--search N: a number of attempts above 0 was expected")
    options = AuditOptions(tasks=words, split=split, policies=chosen, jobs=jobs, search=search, run=run)
    # The command that shows a finding needs all of them again.
    given: dict[str, object] = settings.model_dump(include=settings.model_fields_set - {"state"})
    flags = [
        (name.replace("_", "-"), value)
        for name, values in given.items()
        for value in (cast("tuple[object, ...]", values) if isinstance(values, tuple) else (values,))
        if value not in (None, False)
    ]
    again = "".join(
        f" --{name}" if value is True else f" --{name} {shlex.quote(str(value))}" for name, value in flags
    )
    state = f" --state {shlex.quote(str(settings.state))}" if settings.state != default_state() else ""
    report = Report(again, state, json)
    return run_async(audit, settings, options, report)
