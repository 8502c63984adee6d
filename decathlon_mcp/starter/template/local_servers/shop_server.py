"""MCP server `shop`: the shelves of a shop, and its order list. Run as `shop_server.py WORKSPACE`.

The agent has these tools and no others, so it sees of the workspace what they show.
"""

import csv
import sys
from pathlib import Path
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

STOCK = Path(sys.argv[1]) / "stock.csv"
ORDER = Path(sys.argv[1]) / "order.csv"
HEADER = ["product", "quantity"]

server = MCPServer("shop", log_level="WARNING")


@server.tool(structured_output=False)
def list_shelves() -> str:
    """List the shelves."""
    return "\n".join(sorted({row["shelf"] for row in stock()}))


@server.tool(structured_output=False)
def read_shelf(shelf: str) -> str:
    """Show the products on a shelf: how many pieces there are, the minimum, and the pieces in a pack."""
    products = [row for row in stock() if row["shelf"] == shelf]
    if not products:
        raise ToolError(f"There is no shelf {shelf!r}; list_shelves lists them")
    return "\n".join(
        f"{row['product']}: {row['pieces']} pieces, minimum {row['minimum']}, packs of {row['pack']}"
        for row in products
    )


@server.tool(structured_output=False)
def order(
    product: str,
    quantity: Annotated[int, Field(ge=0, le=1000, description="Pieces; 0 removes it from the list.")],
) -> str:
    """Put a product on the order list. A second order of a product replaces the first."""
    if product not in {row["product"] for row in stock()}:
        raise ToolError(f"There is no product {product!r}; read_shelf shows them")
    lines = {**ordered(), product: quantity}
    with ORDER.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows((name, pieces) for name, pieces in lines.items() if pieces)
    return f"On the list: {', '.join(f'{pieces} {name}' for name, pieces in lines.items() if pieces)}"


def stock() -> list[dict[str, str]]:
    with STOCK.open(newline="") as file:
        return list(csv.DictReader(file))


def ordered() -> dict[str, int]:
    if not ORDER.exists():
        return {}
    with ORDER.open(newline="") as file:
        return {row["product"]: int(row["quantity"]) for row in csv.DictReader(file)}


if __name__ == "__main__":
    server.run()
