"""Prints what tests look at in the logs of a folder, the oldest first, as JSON. Argument: the folder."""

import json
import sys
from pathlib import Path

from inspect_ai.log import read_eval_log

logs = [read_eval_log(str(path)) for path in Path(sys.argv[1]).glob("*.eval")]
logs.sort(key=lambda log: log.eval.created)
print(  # noqa: T201
    json.dumps(
        [
            {
                "status": log.status,
                "eval": log.eval.eval_id,
                "arguments": log.eval.task_args_passed,
                "metadata": log.eval.metadata,
                "results": [
                    [score.name, score.reducer, name, metric.value]
                    for score in log.results.scores
                    for name, metric in score.metrics.items()
                ],
                "samples": [
                    {
                        "id": sample.id,
                        "epoch": sample.epoch,
                        "error": sample.error and sample.error.message,
                        "limit": sample.limit and sample.limit.type,
                        "metadata": sample.metadata,
                        "scores": {
                            name: [score.value, score.explanation, score.metadata]
                            for name, score in (sample.scores or {}).items()
                        },
                    }
                    for sample in log.samples
                ],
            }
            for log in logs
        ]
    )
)
