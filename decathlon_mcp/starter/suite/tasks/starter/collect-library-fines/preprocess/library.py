"""Content of the library's database. Days are relative to today: -3 is three days ago."""

import random

MEMBERS = [
    (1, "Abdi, Hodan", "adult", None),
    (2, "Bauer, Lukas", "child", None),
    (3, "Castro, Inês", "adult", None),
    (4, "Dahl, Signe", "staff", None),
    (5, "Eze, Chidi", "adult", None),
    (6, "Fontaine, Luc", "adult", -20),
    (7, "Garcia, Noa", "child", None),
    (8, "Haas, Ruth", "adult", None),
    (9, "Ito, Kenji", "adult", None),
    (10, "Jansen, Piet", "adult", None),
    (11, "Kaya, Elif", "child", None),
    (12, "Lind, Maja", "adult", None),
    (13, "Moreau, Zoé", "adult", None),
    (14, "Novak, Petr", "staff", None),
]

CLOSED = [
    (-1, "boiler"),
    (-6, "holiday"),
    (-7, "holiday"),
    (-13, "stocktaking"),
    (-20, "storm"),
    (-21, "storm"),
    (4, "outing"),
]

# loan, member, copy, lent, due, returned
OUT = [
    (101, 1, 11, -38, -10, None),
    (102, 1, 12, -32, -4, None),
    (103, 2, 13, -60, -32, None),
    (104, 2, 14, -33, -5, None),
    (105, 3, 15, -33, -5, None),
    (106, 4, 16, -90, -62, None),
    (107, 5, 17, -88, -60, None),
    (108, 5, 18, -40, -12, None),
    (109, 6, 19, -70, -42, None),
    (110, 7, 20, -58, -30, None),
    (111, 8, 21, -28, 0, None),
    (112, 8, 22, -27, 1, None),
    (113, 9, 23, -50, -22, None),
    (114, 10, 24, -52, -24, None),
    (115, 11, 25, -34, -6, None),
    (116, 12, 26, -36, -8, None),
    (117, 12, 27, -36, -8, None),
    (118, 12, 28, -61, -33, -2),
    (119, 13, 29, -38, -10, None),
    (120, 14, 30, -38, -10, None),
    (121, 9, 31, -31, -3, None),
    (122, 3, 32, -45, -17, None),
]

# loan, day, granted
RENEWALS = [
    (103, -33, 1),
    (107, -61, 1),
    (107, -46, 1),
    (110, -31, 0),
    (113, -23, 1),
    (114, -25, 1),
    (114, -11, 0),
    (122, -18, 1),
    (122, -4, 1),
]

# member, day, cents
NOTICES = [
    (1, -12, 140),
    (2, -7, 60),
    (5, -6, 480),
    (5, -20, 220),
    (10, -40, 300),
    (12, -3, 90),
    (13, -9, 20),
]

SHELF = [
    "The Lighthouse Ledger",
    "A Field Guide to Fog",
    "Salt and Slate",
    "Nine Kinds of Rain",
    "The Clockmaker's Aunt",
]


def past_loans() -> list[tuple[int, int, int, int, int, int]]:
    """Generate returned loans, some of them late."""
    rng = random.Random("library")
    loans: list[tuple[int, int, int, int, int, int]] = []
    for loan in range(1, 101):
        lent = rng.randint(-400, -60)
        loans.append(
            (loan, rng.randint(1, 14), rng.randint(1, 40), lent, lent + 28, lent + rng.randint(3, 45))
        )
    return loans
