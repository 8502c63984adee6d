"""`packaging/install.py`: what `make` shows while it installs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "packaging" / "install.py"
HASH = f"--hash=sha256:{'0' * 64}"


def install(lock: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Install without an index, so that only what is installed already can be found."""
    lines = (f"{requirement} {HASH}\n" for requirement in requirements)
    lock.write_text("--no-index\n" + "".join(lines), "utf-8")
    command = [sys.executable, str(PROGRAM), str(lock)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_installation_says_what_it_installed_and_how_long_it_took(tmp_path: Path) -> None:
    done = install(tmp_path / "requirements.lock", f"iniconfig=={version('iniconfig')}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("requirements.lock: installed after ")


def test_a_failed_installation_shows_the_end_of_pips_output_and_where_all_of_it_is(tmp_path: Path) -> None:
    done = install(tmp_path / "requirements.lock", "no-such-package-anywhere==1.0")
    assert done.returncode != 0
    assert "No matching distribution found for no-such-package-anywhere==1.0" in done.stderr
    log = Path(done.stderr.splitlines()[-1].removeprefix("The whole output of pip: "))
    assert "no-such-package-anywhere" in log.read_text("utf-8")
