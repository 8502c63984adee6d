"""Never comes to an end."""

import time

time.sleep(600)
