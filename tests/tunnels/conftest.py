"""The real driver of `tests.driver`, for both Pythons."""

from tests.driver.conftest import peer as peer
from tests.driver.conftest import pytest_generate_tests as pytest_generate_tests
from tests.driver.conftest import python as python
