"""An installed server's sandboxes, and programs beside its episodes, see nothing of the answers: not a hash.

The project is installed as a wheel into a virtual environment; what the server needs besides comes from the
environment of the tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from decathlon_mcp.starter import suite_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEARCH = Path(__file__).with_name("search_files.py")
BUILD_SECONDS = 300
SEARCH_SECONDS = 300
NEEDED_EXTRAS = (("decathlon-mcp", "server"), ("decathlon-mcp", "starter"))
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
def python_with_the_wheel(tmp_path_factory: pytest.TempPathFactory, namespaces: None) -> Path:
    """The Python of an environment in which the project is installed from a wheel, with its origin."""
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
    for required in _required("decathlon-mcp", {}).values():
        for file in required.files or ():
            target = packages / file
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), target)
    (metadata,) = packages.glob("decathlon_mcp-*.dist-info")
    # What the searches below must not find is there.
    assert "explain-outage/groundtruth_workspace/outage.json,sha256=" in (metadata / "RECORD").read_text()
    origin = json.loads((metadata / "direct_url.json").read_text())["archive_info"]
    # pip notes a hash since 23.1.
    assert not origin or hashlib.sha256(wheel.read_bytes()).hexdigest() in str(origin)
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


def _required(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """What a distribution requires, without extras but `NEEDED_EXTRAS`."""
    for requirement in distribution(name).requires or ():
        words = re.match(r"([\w.-]+)(.*)", requirement)
        assert words is not None
        extra = re.search(r"extra == '(\w+)'", words[2].replace('"', "'"))
        if (extra is None or (name, extra[1]) in NEEDED_EXTRAS) and words[1] not in found:
            with suppress(PackageNotFoundError):  # of another platform or Python
                found[words[1]] = distribution(words[1])
                _required(words[1], found)
    return found


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
    """The program runs with the Python of the server's environment, the worst case.

    What reads metadata, such as `import mcp`, works: only the lines of answers are missing.
    """
    (search / "both.py").write_text(
        "import runpy\n"
        "from importlib.metadata import distribution\n"
        "from pathlib import Path\n"
        "files = [str(file) for file in distribution('decathlon-mcp').files]\n"
        "print('client', 'decathlon_client/batch.py' in files,\n"
        "    'starter', any('starter/suite' in file for file in files), flush=True)\n"
        "runpy.run_path(str(Path(__file__).with_name('search_files.py')), run_name='__main__')\n"
    )
    options = ["--model-url", "http://127.0.0.1:9", "--show", str(search)]
    command = [str(installed), "-m", "decathlon_mcp.cli", "run", "explain-outage", *options, "--"]
    program = [str(installed), "-I", str(search / "both.py")]
    done = _run([*command, *program], DECATHLON_STATE=str(search.parent / "state"))
    _check_found_nothing(done.stderr)
    assert "client True starter False" in done.stderr


@pytest.mark.timeout(2 * BUILD_SECONDS + SEARCH_SECONDS)
def test_no_file_that_a_local_sandbox_reads_has_a_hash_of_an_answer(installed: Path, search: Path) -> None:
    state = search.parent / "state"
    done = _run([str(installed), "-c", IN_SANDBOX, str(search), str(state)])
    _check_found_nothing(done.stdout)
