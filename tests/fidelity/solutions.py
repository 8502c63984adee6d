"""All scripted attempts at tasks of Toolathlon."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fidelity.attempts import AS_IS
from tests.fidelity.calls import Solution
from tests.fidelity.mail import MAIL
from tests.fidelity.recorded import RECORDED

SOLUTIONS: Mapping[str, Solution] = {**AS_IS, **MAIL, **RECORDED}
