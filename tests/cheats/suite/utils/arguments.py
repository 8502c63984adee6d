"""Parses an evaluator's command line."""

import argparse


def read_arguments():
    parser = argparse.ArgumentParser()
    for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
        parser.add_argument(f"--{name}")
    return parser.parse_args()
