"""Prints the state of the evaluator, compressed: verdicts show the end of what was printed."""

import base64
import json
import zlib

from utils.inherited_state import state

print(base64.b64encode(zlib.compress(json.dumps(state()).encode())).decode())
