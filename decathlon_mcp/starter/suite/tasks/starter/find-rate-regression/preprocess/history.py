"""History of the price list: each commit's change and message."""

import copy
import json
from collections.abc import Iterator

from utils.preparation import Version

CULPRIT = "Order the zones by name, indent by two"

README = """\
# Price list

`rates.json` holds all our rates, in cents. A parcel costs the `base` of its zone, and `per_kg` for each
kilogram begun.
"""

FREE = """\
From an order of `free_from` euros on, the base is not charged; the kilograms always are.
"""

SURCHARGES = """\
Surcharges are for each parcel and add up.
"""

FIRST = {
    "currency": "EUR",
    "zones": {
        "mainland": {"base": 420, "per_kg": 95, "free_from": 60},
        "islands": {"base": 510, "per_kg": 390, "free_from": 120},
        "mountain": {"base": 640, "per_kg": 180, "free_from": 90},
        "abroad-near": {"base": 980, "per_kg": 310, "free_from": 150},
    },
    "surcharges": {"bulky": 850, "saturday": 400},
}


def versions() -> Iterator[Version]:
    """Return all commits, oldest first."""
    rates, readme, indent = copy.deepcopy(FIRST), README, 4

    def version(date: str, author: str, message: str) -> Version:
        return Version(
            date,
            author,
            message,
            {"rates.json": json.dumps(rates, indent=indent) + "\n", "README.md": readme},
        )

    zones, surcharges = rates["zones"], rates["surcharges"]
    yield version("2026-01-05", "Mirela Stan", "Rates for 2026")
    surcharges["fragile"] = 220
    yield version("2026-01-15", "Jonas Falk", "Add a surcharge for fragile parcels")
    zones["islands"]["per_kg"] = 420
    yield version("2026-01-22", "Mirela Stan", "Islands: the new ferry contract, 30 more a kilogram")
    zones["harbour"] = {"base": 380, "per_kg": 85, "free_from": 60}
    yield version("2026-01-30", "Ada Brandt", "New zone: harbour, fetched at the quay")
    zones["mainland"]["free_from"] = 65
    readme += FREE
    yield version("2026-02-04", "Jonas Falk", "Mainland: free from 65; say in the README what that means")
    surcharges["bulky"] = 990
    yield version("2026-02-09", "Ada Brandt", "Bulky parcels: try 990 for two months")
    surcharges["saturday"] = 450
    yield version("2026-02-11", "Mirela Stan", "Saturdays cost us more: 450")
    zones = rates["zones"] = dict(sorted(zones.items()))
    zones["islands"]["per_kg"] = 240
    indent = 2
    yield version("2026-02-18", "Jonas Falk", CULPRIT)
    readme += SURCHARGES
    yield version("2026-02-25", "Ada Brandt", "README: surcharges add up")
    zones["mountain"]["base"] = 700
    yield version("2026-03-03", "Mirela Stan", "Mountain: the pass road is tolled now")
    zones["islands"]["base"] = 540
    yield version("2026-03-10", "Jonas Falk", "Islands: 30 more, the quay asks a fee for each parcel")
    zones["abroad-far"] = {"base": 1650, "per_kg": 720, "free_from": 300}
    yield version("2026-03-19", "Ada Brandt", "New zone: abroad-far")
    for zone in zones.values():
        zone["per_kg"] = -(-zone["per_kg"] * 110 // 500) * 5
    yield version(
        "2026-04-01", "Mirela Stan", "Fuel: every kilogram 10 % dearer, rounded up to the next 5 cents"
    )
    surcharges["bulky"] = 850
    yield version("2026-04-08", "Ada Brandt", "Bulky parcels: the trial is over, back to 850")
    zones["harbour"]["free_from"] = 55
    yield version("2026-04-14", "Jonas Falk", "Harbour: free from 55")
