"""Prints what `samples_df` and `messages_df` read in a folder of logs, as JSON. Argument: the folder."""

import json
import sys

from inspect_ai.analysis import messages_df, samples_df
from pandas import isna as is_missing

samples = samples_df(sys.argv[1])
messages = messages_df(sys.argv[1])
rows = [
    {
        "uuid": row["sample_id"],
        "error": None if is_missing(row["error"]) or not row["error"] else str(row["error"]),
        "score_success": None if is_missing(row["score_success"]) else float(row["score_success"]),
    }
    for _, row in samples.iterrows()
]
print(json.dumps({"samples": rows, "roles": sorted(set(messages["role"]))}))  # noqa: T201
