"""Passes if the log has a call of `say` with the password, and the agent's last message is `say`."""

import json
import sys
from pathlib import Path

from utils.arguments import read_arguments

log = json.loads(Path(read_arguments().res_log_file).read_text())
calls = [call["function"] for message in log["messages"] for call in message.get("tool_calls") or ()]
replies = [message["content"] for message in log["messages"] if message["role"] == "assistant"]
expected = {"name": "root-say", "arguments": '{"text": "friend"}'}
sys.exit(0 if calls[:1] == [expected] and replies[-1] == "say" else 1)
