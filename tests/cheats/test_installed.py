"""An installed server's sandboxes, and programs beside its episodes, see nothing of the answers: not a hash.

The project is installed as a wheel into a virtual environment; what the server needs besides comes from the
environment of the tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from decathlon_mcp.sandboxes.host.isolation import why_unavailable
from decathlon_mcp.starter import suite_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEARCH = Path(__file__).with_name("search_files.py")
BUILD_SECONDS = 300
SEARCH_SECONDS = 300
MIN_CONTENT_BYTES = 24
"""Shorter contents of files are found by accident."""
IN_SANDBOX = """
import sys
from pathlib import Path, PurePosixPath
import subprocess
from decathlon_mcp.sandboxes.host.plugin import answer_folders
from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.host.command import isolated_command
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.settings import read_settings

program = (Path(sys.argv[1]) / "search_files.py").read_text()
texts = (Path(sys.argv[1]) / "texts.json").read_text()
program = program.replace('Path(__file__).with_name("texts.json").read_text()', repr(texts))
settings = read_settings({"state": Path(sys.argv[2])})
provider = HostProvider("tests", Path(sys.argv[2]) / "sandboxes", hidden=answer_folders(settings))
spec = SandboxSpec("search", ("python3", "-I", "-c", program), PurePosixPath("/episode"), limits=Limits())
with isolated_command(spec, provider._machine.files(spec)) as command:
    sys.exit(subprocess.run(command.argv, pass_fds=command.descriptors, cwd="/").returncode)
"""


@pytest.fixture(scope="module", name="installed")
def python_with_the_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the project is installed from a wheel, with its origin."""
    if reason := why_unavailable():
        pytest.skip(f"no namespaces here: {reason}")
    folder = tmp_path_factory.mktemp("installed")
    for above in (folder, folder.parent):
        above.chmod(0o755)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    _run([*build, "--wheel-dir", str(folder / "dist"), str(ROOT)])
    _run([sys.executable, "-m", "venv", str(folder / "environment")])
    python = folder / "environment" / "bin" / "python"
    (wheel,) = (folder / "dist").iterdir()
    _run([str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)])
    packages = next((folder / "environment" / "lib").glob("python*/site-packages"))
    for path in site.getsitepackages():
        shutil.copytree(path, packages, copy_function=_link, ignore=_ignored, dirs_exist_ok=True)
    (metadata,) = packages.glob("decathlon_mcp-*.dist-info")
    # What the searches below must not find is there.
    assert "explain-outage/groundtruth_workspace/outage.json,sha256=" in (metadata / "RECORD").read_text()
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in (metadata / "direct_url.json").read_text()
    (packages / "wheels").mkdir()
    shutil.copy(wheel, packages / "wheels")
    return python


@pytest.fixture(name="search")
def search_with_its_texts(installed: Path, tmp_path: Path) -> Path:
    """A folder with the program, and with whatever betrays a file of the bundled suite or its solutions."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "search"
    folder.mkdir()
    shutil.copy(SEARCH, folder)
    texts, hashes = set[bytes](), set[bytes]()
    answers = [*suite_path().glob("**/groundtruth_workspace/**/*"), *suite_path().glob("**/evaluation/**/*")]
    for file in (*answers, *(suite_path().parent / "oracles").iterdir()):
        if not file.is_file() or "__pycache__" in file.parts or not file.stat().st_size:
            continue
        content = file.read_bytes()
        digests = [hashlib.new(name, content).digest() for name in ("md5", "sha1", "sha256", "sha512")]
        hashes |= {text for digest in digests for text in _texts_of(digest)}
        hashes |= _texts_of(hashlib.sha1(b"blob %d\0" % len(content) + content).digest())
        if "evaluation" not in file.parts:
            texts.add(f"{file.relative_to(suite_path().parent)},".encode())
            texts |= {content} if len(content) >= MIN_CONTENT_BYTES else set()
    (wheel,) = (installed.parents[2] / "dist").iterdir()
    hashes |= _texts_of(hashlib.sha256(wheel.read_bytes()).digest())
    order = {"texts": texts, "hashes": hashes}
    backwards = {name: [text[::-1].decode("latin-1") for text in found] for name, found in order.items()}
    (folder / "texts.json").write_text(json.dumps(backwards))
    return folder


def _texts_of(digest: bytes) -> set[bytes]:
    encoded = (base64.b64encode(digest), base64.urlsafe_b64encode(digest))
    return {digest.hex().encode(), *(text.rstrip(b"=") for text in encoded)}


def _link(source: str, target: str) -> None:
    if not Path(target).exists():
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def _ignored(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if "decathlon" in name or name == "__pycache__"}


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    done = subprocess.run(
        command,
        env={**variables, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS + SEARCH_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def _check_found_nothing(output: str) -> None:
    lines = [line for line in output.splitlines() if line.startswith(("found", "searched"))]
    (last,) = [line for line in lines if line.startswith("searched")]
    assert int(last.split()[1]) > 1000
    assert lines == [last], output


@pytest.mark.timeout(2 * BUILD_SECONDS + SEARCH_SECONDS)
def test_no_file_that_a_program_reads_has_a_hash_of_an_answer(installed: Path, search: Path) -> None:
    """The program runs with the Python of the server's environment, the worst case."""
    options = ["--model-url", "http://127.0.0.1:9", "--show", str(search)]
    command = [str(installed), "-m", "decathlon_mcp.cli", "run", "explain-outage", *options, "--"]
    program = [str(installed), "-I", str(search / "search_files.py")]
    done = _run([*command, *program], DECATHLON_STATE=str(search.parent / "state"))
    _check_found_nothing(done.stderr)


@pytest.mark.timeout(2 * BUILD_SECONDS + SEARCH_SECONDS)
def test_no_file_that_a_local_sandbox_reads_has_a_hash_of_an_answer(installed: Path, search: Path) -> None:
    state = search.parent / "state"
    done = _run([str(installed), "-c", IN_SANDBOX, str(search), str(state)])
    _check_found_nothing(done.stdout)


@pytest.mark.timeout(2 * BUILD_SECONDS + SEARCH_SECONDS)
def test_packages_are_still_found_without_the_lines_of_answers(installed: Path, tmp_path: Path) -> None:
    """What reads metadata, such as `import mcp`, works; only the lines are missing."""
    tmp_path.chmod(0o755)
    program = tmp_path / "program"
    program.mkdir()
    (program / "names.py").write_text(
        "from importlib.metadata import distribution, entry_points\n"
        "found = distribution('decathlon-mcp')\n"
        "files = [str(file) for file in found.files]\n"
        "print('version', found.version, 'client', 'decathlon_client/batch.py' in files,\n"
        "    'starter', any('starter/suite' in file for file in files))\n"
    )
    options = ["--model-url", "http://127.0.0.1:9", "--show", str(program)]
    command = [str(installed), "-m", "decathlon_mcp.cli", "run", "explain-outage", *options, "--"]
    done = _run(
        [*command, str(installed), str(program / "names.py")], DECATHLON_STATE=str(tmp_path / "state")
    )
    assert "client True starter False" in done.stderr
