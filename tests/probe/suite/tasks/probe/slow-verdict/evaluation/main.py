"""Never ends."""

import time

time.sleep(600)
