"""The parts list, the people, and the requests."""

from dataclasses import dataclass

README = """\
# Parts list

`parts.json` has the parts that we sell: the price in cents, the stock at which we order more, and the supplier.
"""

PARTS = {
    "A-100": {"price_cents": 1250, "reorder_at": 20, "supplier": "Nordwerk"},
    "B-210": {"price_cents": 415, "reorder_at": 15, "supplier": "Halden & Co"},
    "C-305": {"price_cents": 890, "reorder_at": 40, "supplier": "Nordwerk"},
    "D-118": {"price_cents": 7200, "reorder_at": 3, "supplier": "Mühlbach"},
    "E-402": {"price_cents": 335, "reorder_at": 60, "supplier": "Halden & Co"},
    "F-077": {"price_cents": 2000, "reorder_at": 8, "supplier": "Mühlbach"},
}

STAFF = [
    ("Ada Brandt", "buyer", None),
    ("Jonas Falk", "storekeeper", None),
    ("Mirela Stan", "head", None),
    ("Petr Novak", "buyer", "2026-04-30"),
]

RIGHTS = [
    ("buyer", "price_cents", 10),
    ("buyer", "supplier", None),
    ("storekeeper", "reorder_at", None),
    ("head", "price_cents", None),
    ("head", "reorder_at", None),
    ("head", "supplier", None),
]


@dataclass(frozen=True)
class Request:
    """A request. `old`: the value that its signer saw. `is_applied`: what the rules decide."""

    id: str
    signer: str
    signed_at: str
    part: str
    field: str
    old: int | str
    new: int | str
    is_applied: bool

    @property
    def text(self) -> str:
        """The file's content."""
        return (
            f"# {self.id}\n\nPart: {self.part}\nField: {self.field}\nFrom: {self.old}\nTo: {self.new}\n"
            f"Signed: {self.signer}, {self.signed_at}\n"
        )


REQUESTS = [
    Request("R-31", "Ada Brandt", "2026-05-04 09:10", "A-100", "price_cents", 1250, 1320, True),
    Request("R-32", "Jonas Falk", "2026-05-04 08:55", "B-210", "reorder_at", 15, 25, True),
    Request("R-33", "Jonas Falk", "2026-05-04 09:40", "C-305", "price_cents", 890, 940, False),
    Request("R-34", "Ada Brandt", "2026-05-04 11:30", "A-100", "price_cents", 1320, 1390, True),
    Request("R-35", "Ada Brandt", "2026-05-04 10:20", "A-100", "price_cents", 1250, 1300, False),
    Request("R-36", "Petr Novak", "2026-05-05 08:15", "E-402", "supplier", "Halden & Co", "Nordwerk", False),
    Request("R-37", "Ada Brandt", "2026-05-05 09:00", "F-077", "price_cents", 2000, 2300, False),
    Request("R-38", "Mirela Stan", "2026-05-05 09:30", "F-077", "price_cents", 2000, 2300, True),
    Request("R-39", "Ada Brandt", "2026-05-05 12:10", "C-305", "price_cents", 890, 979, True),
    Request("R-40", "Jonas Falk", "2026-05-05 07:50", "B-210", "reorder_at", 25, 30, True),
]
