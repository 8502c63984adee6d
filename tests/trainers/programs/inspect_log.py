"""Prints the result from the log of an evaluation. Argument: the folder of the log."""

import sys
from pathlib import Path

from inspect_ai.log import read_eval_log

(path,) = Path(sys.argv[1]).glob("*.eval")
log = read_eval_log(str(path))
(score,) = log.results.scores
print(log.status, len(log.samples), score.metrics["mean"].value)  # noqa: T201
print("metadata", log.samples[0].scores["verdict"].metadata["status"])  # noqa: T201
