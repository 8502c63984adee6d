"""Prints what `samples_df` and `messages_df` read in a folder of logs, as JSON. Argument: the folder."""

import json
import sys

from inspect_ai.analysis import messages_df, samples_df

samples = samples_df(sys.argv[1])
messages = messages_df(sys.argv[1])
rows = [
    {
        "uuid": row["sample_id"],
        "error": row["error"] or None,
        "score_success": None if row["error"] else float(row["score_success"]),
    }
    for _, row in samples.fillna("").iterrows()
]
print(json.dumps({"samples": rows, "roles": sorted(set(messages["role"]))}))  # noqa: T201
