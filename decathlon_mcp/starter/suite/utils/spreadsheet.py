"""Reads an agent's workbook and calculates its formulas with the MCP server that the agent used.

A workbook does not always store the results of its formulas, and stored results may be false. So the
evaluator starts its own server on a copy, which calculates the cells. The evaluator can also change cells of
the copy and check that dependent cells change.
"""

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from openpyxl import load_workbook
from openpyxl.workbook import Workbook

from utils.evaluation import Wrong, require
from utils.submission import MAX_UNPACKED_BYTES, regular_file

if TYPE_CHECKING:
    from mcp import ClientSession

MAX_SECONDS = 120


def open_workbook(workspace: Path, name: str) -> Workbook:
    """Open an Excel workbook with its formulas, not their results."""
    path = regular_file(workspace, name)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
            require(unpacked <= MAX_UNPACKED_BYTES, f"{name} unpacks to more than {MAX_UNPACKED_BYTES} bytes")
            for part in archive.infolist():
                require(b"<!DOCTYPE" not in archive.read(part), f"{name} defines entities")
        return load_workbook(path, keep_links=False)
    except Wrong:
        raise
    except Exception as error:  # any exception of openpyxl is caused by the file
        raise Wrong(f"{name} is not a workbook that can be read: {error}") from None


@dataclass(frozen=True)
class Calculation:
    """A copy of a workbook, opened in a server."""

    session: "ClientSession"
    path: Path

    async def read(self, sheet: str, cells: str) -> list[list[object]]:
        """Return the values of a range of cells, row by row; dates as ISO 8601."""
        reply = await self._call("read_range", sheet=sheet, range=cells)
        return reply["values"]

    async def write(self, sheet: str, at: str, rows: list[list[object]]) -> None:
        """Overwrite cells of the copy, starting at `at`."""
        await self._call("write_range", sheet=sheet, at=at, rows=rows)

    async def _call(self, tool: str, **arguments: object) -> dict[str, list[list[object]]]:
        from mcp import MCPError

        try:
            reply = await self.session.call_tool(tool, {"path": self.path.name, **arguments})
        except MCPError as error:  # the server crashed on the workbook
            raise Wrong(f"{self.path.name} cannot be calculated: {error}") from None
        if reply.is_error:
            raise Wrong(f"{self.path.name} cannot be calculated: {reply.content[0].text}")
        return reply.structured_content


def calculate(workbook: Path, check: Callable[[Calculation], Awaitable[None]]) -> None:
    """Run a check on a calculated copy of the workbook. Raises Wrong if it exceeds MAX_SECONDS."""
    anyio.run(_calculate, workbook, check)


async def _calculate(workbook: Path, check: Callable[[Calculation], Awaitable[None]]) -> None:
    # Imported here because it takes a second of CPU, and most attempts fail before this check.
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    wrong = Wrong(f"{workbook.name} was not calculated within {MAX_SECONDS} s")
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copyfile(workbook, Path(folder) / workbook.name)
        command = ["-P", "-m", "excel_mcp", "stdio", "--allow-dir", folder]
        async with (
            stdio_client(StdioServerParameters(command=sys.executable, args=command)) as streams,
            ClientSession(*streams) as session,
        ):
            await session.initialize()
            with anyio.move_on_after(MAX_SECONDS):
                try:
                    await check(Calculation(session, copy))
                except Wrong as error:  # raised below, because the contexts would wrap it in exception groups
                    wrong = error
                else:
                    return
    raise wrong
