"""Pass rates of a server's own episodes, by which a trainer draws tasks while its model learns.

Replays and branches do not count, nor does what has no reward. The same seed draws the same tasks as long as
the store is the same: an episode that ends changes the rates.
"""

from __future__ import annotations

from functools import partial

from decathlon_mcp.catalogue.pass_rates import MAX_RATED, LiveRates, PassRate, PassRates
from decathlon_mcp.storage.store import Store

_RATES = """
SELECT suite, task, total(success), count(*) FROM (
    SELECT suite, task, ifnull(success, 0) AS success,
        row_number() OVER (PARTITION BY suite, task ORDER BY started_at DESC, public_id) AS place
    FROM (
        SELECT suite, task, success, started_at, public_id FROM episodes
        WHERE reward IS NOT NULL AND NOT is_derived{conditions}
        ORDER BY started_at DESC, public_id DESC LIMIT ?
    )
) WHERE place <= ? GROUP BY suite, task
"""


def live_rates(store: Store) -> LiveRates:
    """What a server with this store knows of its tasks, at each moment."""
    return partial(_rates, store)


def _rates(store: Store, run: str | None, last: int | None, token: str | None) -> PassRates:
    # No token: a server without tokens, or its own administrator's.
    wanted = {"run": run, "token": token}
    given = {column: value for column, value in wanted.items() if value is not None}
    statement = _RATES.format(conditions="".join(f" AND {column} = ?" for column in given))
    rows = store.query(statement, *given.values(), MAX_RATED, last or MAX_RATED)
    return PassRates(
        None, {(suite, task): PassRate(int(passed), attempts) for suite, task, passed, attempts in rows}
    )
