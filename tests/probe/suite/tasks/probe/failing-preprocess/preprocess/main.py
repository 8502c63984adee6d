"""Always fails."""

import sys

print("no more disk in the printer", file=sys.stderr)
sys.exit(7)
