"""Prints what `samples_df` reads, and the roles of messages, as JSON. Argument: the folder of logs."""

import json
import sys
from pathlib import Path

from inspect_ai.analysis import samples_df
from inspect_ai.log import read_eval_log
from pandas import isna as is_missing

samples = samples_df(sys.argv[1])
logs = [read_eval_log(str(path)) for path in Path(sys.argv[1]).glob("*.eval")]
roles = {message.role for log in logs for sample in log.samples for message in sample.messages}
rows = [
    {
        "uuid": row["sample_id"],
        "error": None if is_missing(row["error"]) or not row["error"] else str(row["error"]),
        "score_success": None if is_missing(row["score_success"]) else float(row["score_success"]),
    }
    for _, row in samples.iterrows()
]
print(json.dumps({"samples": rows, "roles": sorted(roles)}))  # noqa: T201
