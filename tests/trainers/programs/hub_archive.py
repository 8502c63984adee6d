"""Extracts the source archive of `clients/`, as `prime env push` makes it, to a folder. Argument: the folder.

Builds a wheel from it, as somebody does who pulled the source; prints name, version and API of the package.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from prime_cli.commands.env import _collect_archive_files, extract_requires_dist_from_wheel
from prime_cli.utils.environment_runtime import classify_runtime_from_metadata

CLIENTS = Path(__file__).parents[3] / "clients"
target = Path(sys.argv[1])
for file in _collect_archive_files(CLIENTS):
    copy = target / file.relative_to(CLIENTS)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
uv = str(Path(sys.executable).with_name("uv"))
subprocess.run(
    [uv, "build", "--wheel", "--out-dir", "dist", "--quiet"],
    cwd=target,
    stdout=subprocess.DEVNULL,
    check=True,
)
(wheel,) = (target / "dist").glob("*.whl")
project = tomllib.loads((target / "pyproject.toml").read_text("utf-8"))["project"]
runtime = classify_runtime_from_metadata(extract_requires_dist_from_wheel(wheel))
print(project["name"], project["version"], runtime)  # noqa: T201
