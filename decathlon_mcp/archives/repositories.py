"""Repositories in an agent's workspace: removes what makes git run programs or read files outside of it.

An evaluator that calls `git log` in a repository of the agent would otherwise run the agent's programs as its
own user: a repository's configuration names programs for signatures, differences, filters, transports and
more. Only keys that are known to be harmless are kept, because new ones appear with every release of git.

Every folder with `objects` and `refs` is a repository, whatever its name, as in git's `is_git_directory`
(setup.c): also bare repositories, targets of a file `.git` or `commondir`, and submodules' repositories.

A repository can also consist of files elsewhere, such as the grader's. Git finds these by paths in files, and
it knows such files by their last name (or, for `gitdir: PATH`, by their content), so they are recognised by
that name wherever they are: a link to a folder changes every other part of a path. No link in the filtered
workspace leads out, so a path stays inside if it has `..` only at its start and not too often. Git resolves
these paths as the kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import PurePosixPath

MAX_FILE_BYTES = 1 << 18
"""Larger files are emptied. Git's own configuration of a repository with 1,000 branches has 100 KiB."""
MAX_TOTAL_BYTES = 8 << 20
"""Limit on the sum over a workspace, and so on the time for reading; further files are emptied."""
MAX_PATHS = 500_000
"""Paths that are remembered. With more of them, every folder counts as a repository."""
_OUT = "a path that leads out"
_MARKS = {"objects": 1, "refs": 2}
_BOTH = 3

_KEYS = {
    "advice": "*",
    "author": "name email",
    "blame": "blankboundary coloring date markignoredlines markunblamablelines showemail showroot",
    "branch": "autosetupmerge autosetuprebase sort",
    "color": "*",
    "column": "*",
    "commit": "cleanup status verbose",
    "committer": "name email",
    "core": "abbrev autocrlf bare bigfilethreshold checkstat commentchar compression deltabasecachelimit eol"
    " filemode fscache hidedotfiles ignorecase logallrefupdates loosecompression packedgitlimit"
    " packedgitwindowsize precomposeunicode preferssymlinkrefs protecthfs protectntfs quotepath"
    " repositoryformatversion safecrlf sharedrepository sparsecheckout sparsecheckoutcone splitindex"
    " symlinks trustctime untrackedcache warnambiguousrefs whitespace worktree",
    "diff": "algorithm autorefreshindex colormoved colormovedws context dirstat ignoresubmodules"
    " indentheuristic interhunkcontext mnemonicprefix noprefix relative renamelimit renames statgraphwidth"
    " submodule suppressblankempty wordregex wserrorhighlight",
    "extensions": "compatobjectformat noop objectformat preciousobjects refstorage relativeworktrees"
    " worktreeconfig",
    "fetch": "prune prunetags",
    "format": "pretty",
    "gc": "auto autodetach autopacklimit",
    "grep": "*",
    "i18n": "commitencoding logoutputencoding",
    "index": "threads version",
    "init": "defaultbranch",
    "lfs": "repositoryformatversion",
    "log": "abbrevcommit date decorate diffmerges follow graphcolors mailmap showroot",
    "merge": "conflictstyle ff log renamelimit renames stat",
    "notes": "displayref",
    "pull": "ff rebase",
    "push": "autosetupremote default followtags",
    "rebase": "autosquash autostash stat updaterefs",
    "remote": "pushdefault",
    "rerere": "autoupdate enabled",
    "stash": "showincludeuntracked showpatch showstat",
    "status": "*",
    "submodule": "active recurse",
    "tag": "sort",
    "user": "email name signingkey useconfigonly",
    "versionsort": "*",
}
"""Harmless keys of sections without a subsection; `*` for all."""
_SUBSECTION_KEYS = {
    "branch": "description merge pushremote rebase remote",
    "color": "*",
    "remote": "fetch mirror prune prunetags push pushurl skipdefaultupdate skipfetchall tagopt url",
    "submodule": "active branch fetchrecursesubmodules ignore path shallow update url",
}
_LOCATIONS = frozenset({"pushdefault", "pushremote", "pushurl", "remote", "url"})
"""Keys whose value can be a path instead of the name of a remote or a URL of another machine."""
_VALUES = {
    ("extensions", "refstorage"): re.compile("files|reftable"),
    ("submodule", "update"): re.compile("checkout|rebase|merge|none"),
}
"""Keys that are harmless only with these values."""
_DRIVERS = frozenset(
    {
        "ada",
        "bash",
        "bibtex",
        "cpp",
        "csharp",
        "css",
        "dts",
        "elixir",
        "fortran",
        "fountain",
        "golang",
        "html",
    }
    | {"java", "kotlin", "markdown", "matlab", "objc", "pascal", "perl", "php", "python", "r", "ruby", "rust"}
    | {"scheme", "swift", "tex"}
)
"""Drivers of differences that are built into git (gitattributes(5))."""
_MERGE_DRIVERS = frozenset({"text", "binary", "union"})
_OTHER_TOOLS = (
    "/.hg/hgrc",
    "/.hg/hgrc-not-shared",
    "/.hg/sharedpath",
    "/.jj/repo",
    "/.jj/repo/config.toml",
    "/.jj/repo/store/git_target",
    "/.jj/workspace-config.toml",
    "/.sl/config",
    "/.sl/sharedpath",
)
GITFILE = b"gitdir: "
"""Start of a file of any name that sends git to a repository; the repository's path follows."""
_MARK_OF_URL = "file://"

Reduce = Callable[[bytes, str], tuple[bytes, list[str]]]
"""Takes a file's content and its path in the workspace; returns what is kept, and the names of the rest."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What happens to one file. `reduce`: its content is replaced. `executable`: it keeps its mode.

    `refused`: the reason why it is left out, empty if it is not.
    """

    reduce: Reduce | None = None
    executable: bool = True
    refused: str = ""


_UNCHANGED = Treatment()
_LINK = Treatment(refused="a link in a place where git reads its configuration")
_OTHER_TOOL = Treatment(refused="it can make a version control system run programs or leave the workspace")
_REMOTE = Treatment(refused="a remote in a form that git replaced by its configuration")
_PACK_INDEX = Treatment(refused="an index with the paths of packs, which git does without")


def marks_repository(name: str) -> bool:
    """Whether a member of this name can make a folder above it a repository."""
    return "objects" in name or "refs" in name


class Repositories:
    """The repositories of one workspace. `location`: the workspace in sandboxes.

    `names`: names of its members, at least all that `marks_repository` accepts.
    """

    def __init__(self, names: Iterable[str], location: PurePosixPath) -> None:
        self._location = location
        self._remaining_bytes = MAX_TOTAL_BYTES
        self._marks: dict[bytes, int] = {}
        seen = set[bytes]()
        for name in names:
            # An archive need not name the folders above a member.
            while name and len(seen) <= MAX_PATHS and (key := _key(name)) not in seen:
                seen.add(key)
                name, _, part = name.rpartition("/")
                if part in _MARKS:
                    self._marks[_key(name)] = self._marks.get(_key(name), 0) | _MARKS[part]
        self._too_many = len(seen) > MAX_PATHS

    def treatment(self, name: str, link: str | None) -> Treatment:
        """What happens to the file or link of this normalized name. `link`: the target of a link."""
        folder, _, file = name.rpartition("/")
        above, _, last = folder.rpartition("/")
        if f"/{name}".endswith(_OTHER_TOOLS):
            return _OTHER_TOOL
        if link is not None and (file == ".git" or (".git" in link and PurePosixPath(link).name == ".git")):
            # A relative path in a file `.git` is relative to the folder of the name that git opens.
            return _LINK
        if file.startswith("multi-pack-index"):
            return _PACK_INDEX
        if reduce := self._reductions(folder, file):
            return _LINK if link is not None else Treatment(reduce)
        if (last, file) == ("info", "attributes") and self._is_repository(above):
            return _LINK if link is not None else Treatment(_reduce_attributes)
        if last in ("branches", "remotes") and self._is_repository(above):
            return _REMOTE
        if link is not None and file in ("branches", "hooks", "info", "remotes"):
            return _LINK if self._is_repository(folder) else _UNCHANGED
        if last == "hooks" and self._is_repository(above):
            return _LINK if link is not None else Treatment(executable=False)
        return _UNCHANGED

    def _reductions(self, folder: str, file: str) -> Reduce | None:
        match file:
            case ".git":
                return self.reduce_gitfile
            case ".gitmodules":
                return self._reduce_modules
            case "alternates":
                return self._reduce_alternates
            case "tables.list":
                return _reduce_tables
            case "commondir" | "gitdir":
                return self._reduce_path
            case "config" if not self._is_repository(folder):
                return None
            case "config" | "config.worktree":
                return self._reduce_config
            case _:
                return None

    def spend(self, size_bytes: int) -> bool:
        """Whether one more file of this size may be read."""
        if size_bytes > min(MAX_FILE_BYTES, self._remaining_bytes):
            return False
        self._remaining_bytes -= size_bytes
        return True

    def _is_repository(self, folder: str) -> bool:
        return self._too_many or self._marks.get(_key(folder)) == _BOTH

    def reduce_gitfile(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        """Empties a file that git takes for a repository outside of the workspace; for any file."""
        if not content.startswith(GITFILE):
            return content, []
        # Git itself creates such files under the name `.git` only. With another name, the file can be opened
        # through a link from anywhere.
        depth = name.count("/") if f"/{name}".endswith("/.git") else 0
        return self._checked_path(content, content[len(GITFILE) :], depth)

    def _reduce_path(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        return self._checked_path(content, content, name.count("/"))

    def _checked_path(self, content: bytes, path: bytes, depth: int) -> tuple[bytes, list[str]]:
        # Git refuses an empty file in these places; without one, it would look in the folders above.
        if self._stays_inside(_text(path).rstrip("\r\n"), depth):
            return content, []
        return b"", [_OUT]

    def _reduce_alternates(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        folder = PurePosixPath(name).parts[:-2]
        lines = _text(content).split("\n")
        # Git unquotes what begins with a quotation mark, and writes no such line itself.
        kept = [line for line in lines if not line.startswith('"') and self._stays_inside(line, len(folder))]
        # Each relative path becomes longer by the folder's, which may have 2,000 bytes for a path of one.
        count = sum(line[:1] not in ("", "/", "#") for line in kept)
        if not self.spend(count * len(self._absolute("", folder))):
            return b"", ["all paths, which would be too long as absolute ones"]
        # A relative path would lead elsewhere from a folder in which `info` is a link.
        absolute = [line if line[:1] in ("", "/", "#") else self._absolute(line, folder) for line in kept]
        return _bytes("\n".join(absolute)), [_OUT] if len(kept) < len(lines) else []

    def _absolute(self, path: str, folder: tuple[str, ...]) -> str:
        parts = PurePosixPath(path).parts
        climbs = parts.count("..")
        return str(self._location.joinpath(*folder[: len(folder) - climbs], *parts[climbs:]))

    def _reduce_config(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        # Of a remote, a relative path is relative to a working tree, which can be the workspace itself.
        return reduce_config(content, lambda path: self._stays_inside(path, name.count("/")), self._is_near)

    def _reduce_modules(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        # The file is under version control, so it stays as it is where it can.
        depth = name.count("/")
        reduced, removed = reduce_config(
            content,
            lambda path: self._stays_inside(path, depth),
            lambda location: self._is_near(location, depth),
        )
        return (reduced, removed) if removed else (content, [])

    def _is_near(self, location: str, depth: int = 0) -> bool:
        """Whether a remote's location is in the workspace or on another machine."""
        # Git takes a URL for a path if there is such a folder (`get_repo_path`): it must be harmless as both.
        # It completes `~`, and `NAME::` names a program.
        if location.startswith(_MARK_OF_URL):
            location = location.removeprefix(_MARK_OF_URL)
            if "%" in location or not location.startswith("/"):
                return False
        return not location.startswith("~") and "::" not in location and self._stays_inside(location, depth)

    def _stays_inside(self, path: str, depth: int) -> bool:
        """Whether a path, seen from a folder that is so deep in the workspace, ends in the workspace."""
        if path.startswith("/"):
            parts, inside = PurePosixPath(path).parts, self._location.parts
            if parts[: len(inside)] != inside:
                return False
            path, depth = "/".join(parts[len(inside) :]), 0
        return not leads_out(path, depth)


def _reduce_tables(content: bytes, name: str) -> tuple[bytes, list[str]]:
    """The list of a reftable's files, which are next to it."""
    lines = content.split(b"\n")
    kept = [line for line in lines if b"/" not in line]
    return b"\n".join(kept), [_OUT] if len(kept) < len(lines) else []


def leads_out(path: str, depth: int) -> bool:
    """Whether a relative path can end above the workspace. `depth`: levels from it to the path's folder.

    The folder and its parents must be no links, and no link may lead out.
    """
    # After a name, which can be a link, ".." can be anywhere.
    parts = [part for part in path.split("/") if part not in ("", ".")]
    climbs = next((count for count, part in enumerate(parts) if part != ".."), len(parts))
    return "\0" in path or climbs > depth or ".." in parts[climbs:]


def reduce_config(
    content: bytes, stays_inside: Callable[[str], bool], is_near: Callable[[str], bool]
) -> tuple[bytes, list[str]]:
    """A git configuration with its harmless keys alone, and the names of the removed keys.

    `stays_inside` judges the path of a working tree, `is_near` the location of a remote.

    The result has the form that `git config` writes, so that nothing depends on reading the file exactly as
    git does.
    """
    lines: list[str] = []
    removed: dict[str, None] = {}
    current: tuple[str, str | None] | None = None
    try:
        for section, subsection, key, value in _entries(_text(content)):
            if not _is_harmless(section, subsection, key, value, stays_inside, is_near):
                # Thousands of keys can share a subsection that is as long as they are together.
                parts = (part[:100] for part in (section, subsection, key) if part is not None)
                removed[".".join(parts)] = None
                continue
            if (section, subsection) != current:
                current = section, subsection
                quoted = "" if subsection is None else ' "{}"'.format(re.sub(r'(["\\])', r"\\\1", subsection))
                lines.append(f"[{section}{quoted}]\n")
            lines.append(f"\t{key}\n" if value is None else f"\t{key} = {_quoted(value)}\n")
    except _ConfigError:
        removed["everything from the first line that is not valid"] = None
    return _bytes("".join(lines)), list(removed)


def _is_harmless(
    section: str,
    subsection: str | None,
    key: str,
    value: str | None,
    stays_inside: Callable[[str], bool],
    is_near: Callable[[str], bool],
) -> bool:
    lowered = key.lower()
    keys = (_KEYS if subsection is None else _SUBSECTION_KEYS).get(section, "")
    if keys != "*" and lowered not in keys.split():
        return False
    if (section, lowered) == ("core", "worktree"):
        return value is not None and stays_inside(value)
    if lowered in _LOCATIONS and section in ("branch", "remote", "submodule"):
        return value is None or is_near(value)
    allowed = _VALUES.get((section, lowered))
    return allowed is None or allowed.fullmatch(value or "") is not None


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    escaped = escaped.replace("\b", "\\b")
    return f'"{escaped}"' if re.search(r"^\s|\s$|[;#\r\f\v]", value) else escaped


class _ConfigError(Exception):
    """The rest of a configuration cannot be parsed."""


_SECTION = re.compile(r'\[([A-Za-z0-9.-]+)(?:[ \t]+"((?:[^"\\\n\0]|\\[^\n\0])*)")?\]')
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9-]*)[ \t]*(=[ \t]*|(?=\n|\Z))")
_SPACE_AND_COMMENTS = re.compile(r"(?:\s|[#;][^\n]*)*")
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b", '"': '"', "\\": "\\", "\n": ""}


def _entries(text: str) -> Iterator[tuple[str, str | None, str, str | None]]:
    """Section, subsection, key and value, in order; the value is None for a key without `=`.

    Follows `git_parse_source` in git's config.c. Raises _ConfigError.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if "\0" in text:
        raise _ConfigError
    section: str | None = None
    subsection: str | None = None
    at = 0
    while True:
        at = _matched(_SPACE_AND_COMMENTS, text, at).end()
        if at == len(text):
            return
        if text[at] == "[":
            match = _matched(_SECTION, text, at)
            section, dot, rest = match[1].lower().partition(".")
            subsection = rest if dot else None
            if match[2] is not None:
                subsection = re.sub(r"\\(.)", r"\1", f"{rest}.{match[2]}" if dot else match[2])
            at = match.end()
            continue
        match = _matched(_KEY, text, at)
        if section is None:
            raise _ConfigError
        value, at = _value(text, match.end()) if match[2] else (None, match.end())
        yield section, subsection, match[1], value


def _matched(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    match = pattern.match(text, at)
    if match is None:
        raise _ConfigError
    return match


def _value(text: str, at: int) -> tuple[str, int]:
    """A value and the position after it. White space at its end, outside of quotes, is no part of it."""
    value: list[str] = []
    length, quoted = 0, False
    while at < len(text) and (quoted or text[at] not in "\n#;"):
        char = text[at]
        if char == "\n":
            raise _ConfigError
        if char == '"':
            quoted = not quoted
            length = len(value)
        elif char == "\\":
            at += 1
            if text[at : at + 1] not in _ESCAPES or at >= len(text):
                raise _ConfigError
            value.append(_ESCAPES[text[at]])
            length = len(value)
        else:
            value.append(char)
            if quoted or not char.isspace():
                length = len(value)
        at += 1
    if quoted:
        raise _ConfigError
    if text[at : at + 1] in ("#", ";"):
        end = text.find("\n", at)
        at = len(text) if end < 0 else end
    return "".join(value[:length]), at


def _reduce_attributes(content: bytes, name: str) -> tuple[bytes, list[str]]:
    """`info/attributes` without attributes that name programs of the configuration."""
    lines: list[str] = []
    removed: dict[str, None] = {}
    for line in _text(content).split("\n"):
        words = re.split(r"([ \t\r]+)", line)
        bad = dict.fromkeys(word for word in words if not _is_harmless_attribute(word))
        removed |= bad
        lines.append("".join(word for word in words if word not in bad))
    return _bytes("\n".join(lines)), list(removed)


def _is_harmless_attribute(word: str) -> bool:
    name, _, value = word.partition("=")
    match name.lstrip("-!"):
        case "filter":
            return not value
        case "diff":
            return not value or value in _DRIVERS
        case "merge":
            return not value or value in _MERGE_DRIVERS
        case _:
            return True


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _key(folder: str) -> bytes:
    return blake2b(_bytes(folder), digest_size=16).digest()
