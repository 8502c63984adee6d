"""Prints what inspect-ai reads in the logs of a folder, the oldest first, as JSON. Argument: the folder."""

import json
import sys
from pathlib import Path

from inspect_ai.log import read_eval_log

logs = [read_eval_log(str(path)) for path in Path(sys.argv[1]).glob("*.eval")]
logs.sort(key=lambda log: log.eval.created)
print(json.dumps([log.model_dump(mode="json") for log in logs]))  # noqa: T201
