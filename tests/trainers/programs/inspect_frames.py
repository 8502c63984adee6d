"""Prints what data frames of inspect-ai have of the logs of a folder, as JSON. Argument: the folder."""

import json
import sys

from inspect_ai.analysis import events_df, messages_df, samples_df
from pandas import isna as is_missing

samples, messages, events = (read(sys.argv[1], quiet=True) for read in (samples_df, messages_df, events_df))
rows = [
    {
        "uuid": row["sample_id"],
        "error": None if is_missing(row["error"]) or not row["error"] else str(row["error"]),
    }
    for _, row in samples.iterrows()
]
found = {
    "samples": rows,
    "tool calls": int(messages["tool_call_id"].notna().sum()),
    "tool events": int((events["event"] == "tool").sum()),
}
print(json.dumps(found))  # noqa: T201
