"""Errors that leave their process."""

from __future__ import annotations

import copy
import pickle

from decathlon_client import NoVerdictError, errors
from decathlon_client.errors import ClientError


def test_every_error_can_be_pickled_and_copied() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ClientError)
    ]
    for kind in kinds:
        if kind is NoVerdictError:
            error: ClientError = kind("why", status="sandbox_lost", verdict={"status": "sandbox_lost"})
        else:
            error = kind("why", code="a_code", data={"episode": "ep_1", "retryable": True})
        error.page = "http://page"
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error)
            assert (str(again), again.args, vars(again)) == ("why", error.args, vars(error))
