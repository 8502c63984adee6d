"""Fills the office: three people, each with a room, and letters for two of them."""

import random
from pathlib import Path

from utils.office import prepare

PEOPLE = """
ann bob cid dan eve fay gil hal ida jon kim leo mia ned ola pia quin rob sue tom una vic wes xia yan
zoe amy ben cat dot
""".split()


def office(seed: random.Random) -> dict[str, object]:
    """The people who get a letter, and everybody's room."""
    people = seed.sample(PEOPLE, 3)
    rooms = dict(zip(people, map(str, seed.sample(range(1, 10), 3)), strict=True))
    return {"letters": seed.sample(people, 2), "rooms": rooms}


if __name__ == "__main__":
    prepare("office.json", office, Path(__file__).parents[1])
