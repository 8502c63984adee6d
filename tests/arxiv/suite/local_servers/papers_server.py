"""MCP server that searches arXiv and downloads papers."""

import sys
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen, urlretrieve
from xml.etree import ElementTree

from mcp.server import MCPServer

ATOM = "{http://www.w3.org/2005/Atom}"
WORKSPACE = Path(sys.argv[1])

server = MCPServer("papers")


@server.tool()
def search(query: str) -> dict[str, str]:
    """Find papers; returns titles by address."""
    with urlopen(f"https://export.arxiv.org/api/query?{urlencode({'search_query': query})}") as response:
        entries = ElementTree.parse(response).iter(f"{ATOM}entry")
        return {str(entry.findtext(f"{ATOM}id")): str(entry.findtext(f"{ATOM}title")) for entry in entries}


@server.tool()
def download(address: str, file: str) -> str:
    """Download the PDF of a paper into the workspace."""
    urlretrieve(address.replace("http://", "https://").replace("/abs/", "/pdf/"), WORKSPACE / Path(file).name)
    return file


server.run()
