"""From what an agent left behind to a verdict: rubric, log, what crosses of the workspace, grading."""

from decathlon_mcp.rewards.attempt import Attempt, CallRecord
from decathlon_mcp.rewards.grader import OpenSandbox
from decathlon_mcp.rewards.grading import grade
from decathlon_mcp.rewards.rubric import Rubric
from decathlon_mcp.rewards.rubric_file import load_rubric
from decathlon_mcp.rewards.signing import BadSignatureError, PublicKey, Signer
from decathlon_mcp.rewards.trajectory_log import trajectory_log
from decathlon_mcp.rewards.verdict import Verdict, verdict_without_grading
from decathlon_mcp.rewards.workspace import clean_workspace

__all__ = [
    "Attempt",
    "BadSignatureError",
    "CallRecord",
    "OpenSandbox",
    "PublicKey",
    "Rubric",
    "Signer",
    "Verdict",
    "clean_workspace",
    "grade",
    "load_rubric",
    "trajectory_log",
    "verdict_without_grading",
]
