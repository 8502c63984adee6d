"""Errors that leave their process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from decathlon_client import NoVerdictError, Result, client_errors
from decathlon_client.client_errors import ClientError


def test_every_error_can_be_pickled_and_copied() -> None:
    kinds = [
        kind
        for kind in vars(client_errors).values()
        if isinstance(kind, type) and issubclass(kind, ClientError)
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


CLASSES: list[type[ClientError]] = [
    value
    for value in vars(client_errors).values()
    if isinstance(value, type) and issubclass(value, ClientError) and value is not NoVerdictError
]


def made() -> list[ClientError]:
    some = [kind("why", code="a_code", data={"episode": "ep_1", "retryable": True}) for kind in CLASSES]
    return [*some, NoVerdictError("why", status="sandbox_lost", verdict={"status": "sandbox_lost", "n": [1]})]


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_every_error_and_its_result_can_be_pickled_and_copied(copied: Callable[[Any], Any]) -> None:
    for error in made():
        error.page = "http://page"
        again = copied(error)
        assert type(again) is type(error)
        assert (str(again), again.args, vars(again)) == ("why", error.args, vars(error))
        result: Result[None] = Result(0, "task", 0, 0, None, None, None, error, "infrastructure", 1.0)
        assert vars(copied(result).failure) == vars(error)
