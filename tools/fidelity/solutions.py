"""All scripted attempts at tasks of Toolathlon."""

from __future__ import annotations

from collections.abc import Mapping

from tools.fidelity.attempts import AS_IS
from tools.fidelity.calls import Solution
from tools.fidelity.mail import MAIL
from tools.fidelity.recorded import RECORDED

SOLUTIONS: Mapping[str, Solution] = {**AS_IS, **MAIL, **RECORDED}
