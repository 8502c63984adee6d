"""Resolves paths inside the workspace, for the suite's own servers."""

from pathlib import Path

from mcp.server.mcpserver.exceptions import ToolError


class Workspace:
    """A folder that limits access. Paths are relative to it, or absolute and inside it.

    Symbolic links are resolved before the check.
    """

    def __init__(self, root: str) -> None:
        self.root = Path(root).resolve(strict=True)

    def resolve(self, path: str) -> Path:
        """Return the absolute path, which need not exist. Raises ToolError if it is outside the workspace."""
        try:
            resolved = (self.root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise ToolError(f"{path!r} is not a usable path: {error}") from None
        if not resolved.is_relative_to(self.root):
            raise ToolError(f"{path!r} is outside the workspace")
        return resolved

    def file(self, path: str) -> Path:
        """Return the absolute path of an existing file. Raises ToolError for anything else."""
        resolved = self.resolve(path)
        if resolved.is_dir():
            raise ToolError(f"{path!r} is a folder, not a file")
        if not resolved.is_file():
            raise ToolError(f"There is no file {path!r}")
        return resolved

    def name(self, path: Path) -> str:
        """Return the path relative to the workspace, as replies show it."""
        return path.relative_to(self.root).as_posix()
