"""Kills its sandbox's first process, as somebody else on the machine may; only without isolation."""

import os
import signal
import time

os.kill(os.getppid(), signal.SIGKILL)
time.sleep(30)
