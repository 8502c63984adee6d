"""Fills the office: six letters for people in rooms, of three kinds, two of each."""

import random
from pathlib import Path

from utils.office import prepare

PEOPLE = """
ann bob cid dan eve fay gil hal ida jon kim leo mia ned ola pia quin rob sue tom una vic wes xia yan
zoe amy ben cat dot
""".split()


def office(seed: random.Random) -> dict[str, dict[str, str]]:
    """The kind of each person's letter, and everybody's room."""
    people = seed.sample(PEOPLE, 6)
    kinds = seed.sample(["urgent", "plain", "advert"] * 2, 6)
    rooms = map(str, seed.sample(range(1, 10), 6))
    return {"letters": dict(zip(people, kinds, strict=True)), "rooms": dict(zip(people, rooms, strict=True))}


if __name__ == "__main__":
    prepare("office.json", office, Path(__file__).parents[1])
