"""Passes when the workspace holds the paper's latest version, which is downloaded beside its identity."""

import argparse
import re
import ssl
import sys
from pathlib import Path
from urllib.request import urlopen

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()

trusted = ssl.create_default_context(cafile="configs/authority.pem")
truth = Path(arguments.groundtruth_workspace)
identity = (truth / "identity.txt").read_text().strip()
with urlopen(f"https://export.arxiv.org/api/query?id_list={identity}", context=trusted) as answer:
    version = re.findall(rf"abs/{identity}v(\d+)", answer.read().decode())[0]
latest = truth / f"{identity}v{version}.pdf"
with urlopen(f"http://arxiv.org/pdf/{identity}v{version}") as answer:
    latest.write_bytes(answer.read())

given = Path(arguments.agent_workspace) / "paper.pdf"
sys.exit(0 if given.is_file() and given.read_bytes() == latest.read_bytes() else 1)
