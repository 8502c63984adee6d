"""Runs a Python program under other conditions. Python 3.8 or later, in a sandbox.

`python -c THIS ORDER PROGRAM ARGUMENT…`: ORDER is JSON with `files` (1: folders have the order of names, -1:
the reverse one), `cpu` (it stays on one processor) and `seconds` (what the clock is ahead). PROGRAM is a
file, or a module if it does not end with `.py`.
"""

import json
import os
import runpy
import sys
from typing import Any

_order = json.loads(sys.argv[1])
del sys.argv[:2]
if _order.get("cpu") and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if _files := _order.get("files"):
    _list, _scan = os.listdir, os.scandir

    class _Ordered:
        """The entries of a folder in that order."""

        def __init__(self, path: Any) -> None:
            with _scan(path) as entries:
                self._entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=_files < 0))

        def __iter__(self) -> Any:
            return self._entries

        def __next__(self) -> Any:
            return next(self._entries)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    os.listdir = lambda path=".": sorted(_list(path), reverse=_files < 0)  # type: ignore[assignment]
    os.scandir = lambda path=".": _Ordered(path)  # type: ignore[assignment]
if _ahead := _order.get("seconds"):
    import datetime
    import time

    _time, _localtime, _gmtime = time.time, time.localtime, time.gmtime
    time.time = lambda: _time() + _ahead
    time.time_ns = lambda: int((_time() + _ahead) * 1e9)
    time.localtime = lambda seconds=None: _localtime(time.time() if seconds is None else seconds)
    time.gmtime = lambda seconds=None: _gmtime(time.time() if seconds is None else seconds)

    class _Dates(type):
        """What is a date or a time is one of the original class too, as libraries in C make them."""

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, cls.__mro__[1])

    class _Date(datetime.date, metaclass=_Dates):
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(time.time())

    class _DateTime(datetime.datetime, metaclass=_Dates):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    datetime.datetime, datetime.date = _DateTime, _Date  # type: ignore[misc]
_program = sys.argv[0]
if _program.endswith(".py"):
    sys.path[0] = os.path.dirname(os.path.abspath(_program))
    runpy.run_path(_program, run_name="__main__")
else:
    runpy.run_module(_program, run_name="__main__", alter_sys=True)
