"""Passes if the workspace has the latest version of the paper, which the evaluator downloads from arXiv."""

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

authority = Path("configs/authority.pem")
tls_context = ssl.create_default_context(cafile=authority if authority.exists() else None)
truth = Path(arguments.groundtruth_workspace)
paper_id = (truth / "identity.txt").read_text().strip()
with urlopen(f"https://export.arxiv.org/api/query?id_list={paper_id}", context=tls_context) as response:
    version = re.findall(rf"abs/{paper_id}v(\d+)", response.read().decode())[0]
latest = truth / f"{paper_id}v{version}.pdf"
with urlopen(f"http://arxiv.org/pdf/{paper_id}v{version}") as response:
    latest.write_bytes(response.read())

submitted = Path(arguments.agent_workspace) / "paper.pdf"
sys.exit(0 if submitted.is_file() and submitted.read_bytes() == latest.read_bytes() else 1)
