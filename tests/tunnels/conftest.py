"""The real driver of `tests.driver`, for both Pythons."""

from tests.driver.conftest import peer as peer
from tests.driver.conftest import python as python
