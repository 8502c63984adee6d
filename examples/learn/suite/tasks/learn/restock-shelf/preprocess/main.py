"""Fills the shelf: five products, of which two are gone."""

import random
from pathlib import Path

from utils.office import prepare

PRODUCTS = """
tea soap rice salt flour sugar milk bread jam oil honey pasta beans corn yeast cocoa nuts figs dates
plums wine beer juice water glue tape pens ink chalk paper string nails bulbs brush comb towel candles matches
spice mint
""".split()


def shelf(seed: random.Random) -> dict[str, int]:
    """How many are left of each product."""
    products = seed.sample(PRODUCTS, 5)
    gone = seed.sample(products, 2)
    return {product: 0 if product in gone else seed.randint(1, 9) for product in products}


if __name__ == "__main__":
    prepare("stock.json", shelf, Path(__file__).parents[1])
