"""Prints the seccomp profile under which the container can run sandboxes: Docker's, and namespaces.

Docker's default refuses the calls with which bubblewrap makes a sandbox. They create nothing but what belongs
to the new user namespace, in which the sandbox has no capability afterwards.
"""

from __future__ import annotations

import json
import sys

from decathlon_mcp.sandboxes.docker.container import dense_profile

NAMESPACES = ("clone", "mount", "pivot_root", "setdomainname", "sethostname", "setns", "umount2", "unshare")


def main() -> None:
    """Write the profile to standard output, as JSON."""
    profile = json.loads(dense_profile())
    profile["syscalls"].append({"names": NAMESPACES, "action": "SCMP_ACT_ALLOW"})
    json.dump(profile, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
