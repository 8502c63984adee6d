"""Prints what data frames and readers of inspect-ai find in logs, as JSON. Argument: the folder of logs."""

import json
import sys
from pathlib import Path

from inspect_ai.analysis import events_df, messages_df, samples_df
from inspect_ai.log import read_eval_log
from pandas import isna as is_missing

samples, messages, events = (read(sys.argv[1], quiet=True) for read in (samples_df, messages_df, events_df))
logs = [read_eval_log(str(path)) for path in Path(sys.argv[1]).glob("*.eval")]
rows = [
    {
        "uuid": row["sample_id"],
        "error": None if is_missing(row["error"]) or not row["error"] else str(row["error"]),
        "score_success": None if is_missing(row["score_success"]) else float(row["score_success"]),
    }
    for _, row in samples.iterrows()
]
print(  # noqa: T201
    json.dumps(
        {
            "samples": rows,
            # Those of a sample are what a log shows, and those of its events what a frame has.
            "messages": {
                sample.uuid: [[message.id, message.role, message.text] for message in sample.messages]
                for log in logs
                for sample in log.samples
            },
            "frame": {
                str(sample): frame[["message_id", "role", "content"]].values.tolist()
                for sample, frame in messages.groupby("sample_id", sort=False)
            },
            "tool calls": int(messages["tool_call_id"].notna().sum()),
            "tool events": int((events["event"] == "tool").sum()),
            "model events": int((events["event"] == "model").sum()),
        }
    )
)
