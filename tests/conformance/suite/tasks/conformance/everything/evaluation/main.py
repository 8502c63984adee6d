"""Always passes: the conformance suites test the protocol, not the task."""

from __future__ import annotations

import argparse

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--res_log_file", "--agent_workspace", "--groundtruth_workspace", "--launch_time"):
        parser.add_argument(name)
    parser.parse_args()
