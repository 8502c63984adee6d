"""Runs a Python program under other conditions. Python 3.8 or later, in a sandbox.

`python -c THIS ORDER PROGRAM ARGUMENT…`: ORDER is JSON with `files` (1: folders have the order of names, -1:
the reverse one), `cpu` (it stays on one processor), `seconds` (what the clock is ahead) and `environment`
(variables, with which another interpreter does the rest). PROGRAM is a file, or a module if it does not end
with `.py`.
"""

import builtins
import datetime
import json
import os
import runpy
import sys
import time


def order_folders(is_reverse):
    """Let folders be read in the order of names, or the reverse one."""
    list_folder, scan_folder = os.listdir, os.scandir

    class Entries:
        """The entries of a folder in that order."""

        def __init__(self, path):
            with scan_folder(path) as entries:
                self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=is_reverse))

        def __iter__(self):
            return self.entries

        def __next__(self):
            return next(self.entries)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def close(self):
            pass

    os.listdir = lambda path=".": sorted(list_folder(path), reverse=is_reverse)
    os.scandir = lambda path=".": Entries(path)


def set_clock_ahead(seconds):
    """Let the clock say that it is later."""
    now, local, utc, text = time.time, time.localtime, time.gmtime, time.strftime
    time.time = lambda: now() + seconds
    time.time_ns = lambda: int((now() + seconds) * 1e9)
    time.localtime = lambda when=None: local(time.time() if when is None else when)
    time.gmtime = lambda when=None: utc(time.time() if when is None else when)
    time.strftime = lambda layout, when=None: text(layout, time.localtime() if when is None else when)
    time.ctime = lambda when=None: time.asctime(time.localtime(when))

    class Dates(type):
        """What is a date or a time is one of the original class too, as libraries in C make them."""

        def __instancecheck__(cls, value):
            return isinstance(value, cls.__mro__[1])

    class Date(datetime.date, metaclass=Dates):
        @classmethod
        def today(cls):
            return cls.fromtimestamp(time.time())

    class DateTime(datetime.datetime, metaclass=Dates):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls):
            return cls.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)

        @classmethod
        def today(cls):
            return cls.now()

    datetime.datetime, datetime.date = DateTime, Date
    build, originals = builtins.__build_class__, {id(kind): kind.__mro__[1] for kind in (Date, DateTime)}
    # Classes of libraries derive from the original classes: they may have a metaclass of their own.
    builtins.__build_class__ = lambda body, name, *bases, **more: build(
        body, name, *(originals.get(id(base), base) for base in bases), **more
    )


def main():
    text = sys.argv[1]
    order = json.loads(text)
    environment = order.pop("environment", None)
    if environment:
        # Not the environment of the parent: `uv run` would choose packages for another time zone.
        with open("/proc/self/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
        words[words.index(text)] = json.dumps(order)
        os.execve(sys.executable, words, {**os.environ, **environment})
    del sys.argv[:2]
    if order.get("cpu") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if order.get("files"):
        order_folders(order["files"] < 0)
    if order.get("seconds"):
        set_clock_ahead(order["seconds"])
    program = sys.argv[0]
    if program.endswith(".py"):
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
