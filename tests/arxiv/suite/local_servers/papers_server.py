"""MCP server that searches arXiv and downloads papers."""

import ssl
import sys
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen
from xml.etree import ElementTree

from mcp.server import MCPServer

ATOM = "{http://www.w3.org/2005/Atom}"
WORKSPACE = Path(sys.argv[1])
AUTHORITY = Path(__file__).parents[1] / "configs" / "authority.pem"
TLS = ssl.create_default_context(cafile=AUTHORITY if AUTHORITY.exists() else None)

server = MCPServer("papers")


@server.tool()
def search(query: str) -> dict[str, str]:
    """Find papers; returns titles by address."""
    url = f"https://export.arxiv.org/api/query?{urlencode({'search_query': query})}"
    with urlopen(url, context=TLS) as response:
        entries = ElementTree.parse(response).iter(f"{ATOM}entry")
        return {str(entry.findtext(f"{ATOM}id")): str(entry.findtext(f"{ATOM}title")) for entry in entries}


@server.tool()
def download(address: str, file: str) -> str:
    """Download the PDF of a paper into the workspace."""
    url = address.replace("http://", "https://").replace("/abs/", "/pdf/")
    with urlopen(url, context=TLS) as response:
        (WORKSPACE / Path(file).name).write_bytes(response.read())
    return file


server.run()
