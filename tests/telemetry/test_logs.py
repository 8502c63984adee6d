"""Log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from decathlon_mcp.telemetry.logs import LogFormat, configure_logging, fields


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_line_has_its_fields_and_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("decathlon.test").exception("it failed", extra=fields(count=2))
    out, err = capsys.readouterr()
    assert out == ""
    line = json.loads(err)
    assert (line["message"], line["level"], line["count"]) == ("it failed", "error", 2)
    assert "ValueError: no" in line["exception"]


def test_text_line_ends_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    logging.getLogger("decathlon.test").info("episode ended", extra=fields(why="its time is over"))
    assert capsys.readouterr().err.endswith('info    episode ended why="its time is over"\n')


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("text", ["\x9b31m", "\x1b]0;x\x07", "one \x9b2J two", "a \u202e b"])
def test_no_text_reaches_a_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str], style: LogFormat, text: str
) -> None:
    configure_logging("info", style)
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("decathlon.test").exception("it failed", extra=fields(why=text))
    err = capsys.readouterr().err
    assert all(line.isprintable() for line in err.splitlines()), err
    assert json.dumps(text)[1:-1].split()[-1] in err


def test_libraries_log_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", "text")
    logging.getLogger("httpx").info("a request")
    logging.getLogger("httpx").warning("a warning")
    err = capsys.readouterr().err
    assert "a request" not in err
    assert "a warning" in err


def test_opentelemetry_without_a_collector_does_not_fill_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("decathlon_mcp.telemetry.logs.time.monotonic", lambda: now)
    configure_logging("info", "text")
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    for seconds in (0, 1, 30, 61):
        now = 1000.0 + seconds
        exporter.warning("refused after %d s", seconds)
        logging.getLogger("decathlon.test").warning("other after %d s", seconds)
    err = capsys.readouterr().err
    assert [seconds for seconds in (0, 1, 30, 61) if f"refused after {seconds} s" in err] == [0, 61]
    assert err.count("other after") == 4
