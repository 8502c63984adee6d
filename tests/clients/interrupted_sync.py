"""Plays a batch that never ends with the synchronous client, until Ctrl-C."""

from __future__ import annotations

import sys

from decathlon_client.sync import Decathlon, Episode

from tests.probe.serving import SUITE

EPISODES = 2
playing: list[str] = []


def player(e: Episode) -> None:
    playing.append(e.task)
    if len(playing) == EPISODES:
        sys.stdout.write("playing\n")
        sys.stdout.flush()
    e.call("probe__sleep", {"seconds": 100, "note": "late"})


try:
    with (
        Decathlon.embedded(SUITE, "host", state=sys.argv[1], drain_seconds=5) as d,
        d.batch(["find-answer"] * 10, concurrency=EPISODES, progress=False) as batch,
    ):
        for result in batch.run(player):
            raise AssertionError(result)
except KeyboardInterrupt:
    sys.exit(130)
