"""Kills itself before it can report a result."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
