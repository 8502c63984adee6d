"""`init`: write a suite to begin with into a folder, and print what to do with it."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from decathlon_mcp.cli.output import this_command
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.starter import TEMPLATE_TASK, copy_template


def init(folder: Annotated[Path, Parameter(name="FOLDER")], /) -> int:
    """Create a suite of your own, with a task, a server and a test.

    Parameters
    ----------
    folder
        A folder that does not exist yet, or an empty one.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            what = "is not empty" if folder.is_dir() else "is a file"
            raise BadRequestError(f"{folder} {what}: name a folder that does not exist yet, or an empty one")
        existed = folder.exists()
        try:
            files = copy_template(folder)
        except BaseException:
            _remove(folder, keep_folder=existed)
            raise
    except OSError as error:
        problem = error.strerror or str(error)
        where = error.filename or folder
        raise BadRequestError(f"cannot create {folder}: {where}: {problem}") from None
    suite, command, python = shlex.quote(str(folder)), this_command(), this_command("python")
    # The server does not need pytest, so the environment of `make demo` has none.
    install = "" if find_spec("pytest") else f"  {python} -m pip install pytest\n"
    sys.stdout.write(
        f"Created {folder}: {len(files)} files; its README.md says what each is for.\n\n"
        f"  {command} tasks --suite {suite} --check\n"
        f"{install}"
        f"  {python} -m pytest {shlex.quote(str(folder / 'tests'))}\n"
        f"  {command} play {TEMPLATE_TASK} --suite {suite}\n"
        f"  {command} serve --suite {suite}\n"
    )
    return 0


def _remove(folder: Path, *, keep_folder: bool) -> None:
    """Remove everything in a folder that was empty or did not exist."""
    if not keep_folder:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
