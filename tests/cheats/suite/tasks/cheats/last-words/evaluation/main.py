"""Passes when the log says that `say` was called with the password, and the last words are `say`."""

import json
import sys
from pathlib import Path

from utils.arguments import read_arguments

log = json.loads(Path(read_arguments().res_log_file).read_text())
calls = [call["function"] for message in log["messages"] for call in message.get("tool_calls") or ()]
said = [message["content"] for message in log["messages"] if message["role"] == "assistant"]
wanted = {"name": "root-say", "arguments": '{"text": "friend"}'}
sys.exit(0 if calls[:1] == [wanted] and said[-1] == "say" else 1)
