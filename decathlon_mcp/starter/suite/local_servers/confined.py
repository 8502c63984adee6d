"""What the suite's own servers share: paths that stay inside the workspace."""

from pathlib import Path

from mcp.server.mcpserver.exceptions import ToolError


class Workspace:
    """One folder. Paths are relative to it, or absolute and inside it; links are followed before judging."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).resolve(strict=True)

    def resolve(self, path: str) -> Path:
        """The absolute path meant; raises ToolError when it lies outside, whether it exists or not."""
        try:
            resolved = (self.root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise ToolError(f"{path!r} is not a usable path: {error}") from None
        if not resolved.is_relative_to(self.root):
            raise ToolError(f"{path!r} lies outside the workspace")
        return resolved

    def file(self, path: str) -> Path:
        """Like `resolve`, for a file that must be there."""
        resolved = self.resolve(path)
        if resolved.is_dir():
            raise ToolError(f"{path!r} is a folder, not a file")
        if not resolved.is_file():
            raise ToolError(f"There is no file {path!r}")
        return resolved

    def name(self, path: Path) -> str:
        """The path as replies show it: relative to the workspace."""
        return path.relative_to(self.root).as_posix()
