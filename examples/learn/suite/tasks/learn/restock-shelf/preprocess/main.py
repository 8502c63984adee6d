"""Fills the shelf: six products in three states, two in each."""

import random
from pathlib import Path

from utils.office import prepare

PRODUCTS = """
tea soap rice salt flour sugar milk bread jam oil honey pasta beans corn yeast cocoa nuts figs dates
plums wine beer juice water glue tape pens ink chalk paper string nails bulbs brush comb towel candles matches
spice mint
""".split()


def shelf(seed: random.Random) -> dict[str, str]:
    """The state of each product."""
    states = seed.sample(["gone", "low", "full"] * 2, 6)
    return dict(zip(seed.sample(PRODUCTS, 6), states, strict=True))


if __name__ == "__main__":
    prepare("stock.json", shelf, Path(__file__).parents[1])
