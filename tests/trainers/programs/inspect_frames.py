"""Prints what data frames of inspect-ai have of the logs of a folder, as JSON. Argument: the folder."""

import json
import sys

from inspect_ai.analysis import events_df, messages_df, samples_df

samples, messages, events = (read(sys.argv[1], quiet=True) for read in (samples_df, messages_df, events_df))
found = {
    "errors": json.loads(samples.set_index("sample_id")["error"].to_json()),
    "tool calls": int(messages["tool_call_id"].notna().sum()),
    "tool events": int((events["event"] == "tool").sum()),
}
print(json.dumps(found))  # noqa: T201
