"""Repositories in an agent's workspace: removes what makes git and others run programs named in them.

An evaluator that calls `git log` in a repository of the agent would otherwise run the agent's programs as its
own user: a repository's configuration names programs for signatures, differences, filters, transports and
more. Only keys that are known to be harmless are kept, because new ones appear with every release of git.

Which folders are repositories is decided as git does (`is_git_directory` in setup.c): one that has `objects`
and `refs`, whatever its name. This covers bare repositories, those that a file `.git` or `commondir` refers
to, and those of submodules.
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
"""All such files of a workspace together; further ones are emptied. Bounds the time for reading them."""
MAX_PATHS = 500_000
"""Paths that are remembered. With more of them, every folder counts as a repository."""
_MARKS = {"objects": 1, "refs": 2}
_BOTH = 3

_KEYS = {
    "advice": "*",
    "author": "name email",
    "blame": "*",
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
    "/.jj/repo/config.toml",
    "/.jj/workspace-config.toml",
    "/.sl/config",
)

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


class Repositories:
    """The repositories of one workspace, found by the names in it. `location`: the workspace in sandboxes."""

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

    def treatment(self, name: str, *, is_link: bool) -> Treatment:
        """What happens to the file or link of this normalized name. `is_link`: a symlink or a hard link."""
        folder, _, file = name.rpartition("/")
        above, _, last = folder.rpartition("/")
        if f"/{name}".endswith(_OTHER_TOOLS):
            return Treatment(refused="it can make a version control system run programs")
        if file == "config.worktree" or (file == "config" and self._is_repository(folder)):
            return _LINK if is_link else Treatment(self._reduce_config)
        if (last, file) == ("info", "alternates"):
            return _LINK if is_link else Treatment(self._reduce_alternates)
        if (last, file) == ("info", "attributes") and self._is_repository(above):
            return _LINK if is_link else Treatment(_reduce_attributes)
        if is_link and file in ("hooks", "info") and self._is_repository(folder):
            return _LINK
        if last == "hooks" and self._is_repository(above):
            return _LINK if is_link else Treatment(executable=False)
        return _UNCHANGED

    def spend(self, size_bytes: int) -> bool:
        """Whether one more file of this size may be read."""
        if size_bytes > min(MAX_FILE_BYTES, self._remaining_bytes):
            return False
        self._remaining_bytes -= size_bytes
        return True

    def _is_repository(self, folder: str) -> bool:
        return self._too_many or self._marks.get(_key(folder)) == _BOTH

    def _reduce_config(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        return reduce_config(content, lambda path: self._stays_inside(path, name.rpartition("/")[0]))

    def _reduce_alternates(self, content: bytes, name: str) -> tuple[bytes, list[str]]:
        objects = name.rpartition("/info/")[0]
        lines = content.decode("utf-8", "surrogateescape").split("\n")
        kept = [line for line in lines if self._stays_inside(line, objects)]
        removed = ["a path that leads out"] if len(kept) < len(lines) else []
        return "\n".join(kept).encode("utf-8", "surrogateescape"), removed

    def _stays_inside(self, path: str, folder: str) -> bool:
        """Whether a path stays in the workspace, seen from a folder of it."""
        if path.startswith("/"):
            parts, depth = PurePosixPath(path).parts, 0
            inside = len(self._location.parts)
            return parts[:inside] == self._location.parts and ".." not in parts[inside:]
        depth = len(PurePosixPath(folder).parts)
        for part in path.split("/"):
            depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
            if depth < 0:
                return False
        return True


def reduce_config(content: bytes, stays_inside: Callable[[str], bool]) -> tuple[bytes, list[str]]:
    """A git configuration with its harmless keys alone, and the names of those that were removed.

    The result has the form that `git config` writes, so that nothing depends on reading the file exactly as
    git does.
    """
    lines: list[str] = []
    removed: dict[str, None] = {}
    current: tuple[str, str | None] | None = None
    try:
        for section, subsection, key, value in _entries(content.decode("utf-8", "surrogateescape")):
            name = ".".join(part for part in (section, subsection, key) if part is not None)
            if not _is_harmless(section, subsection, key, value, stays_inside):
                removed[name] = None
                continue
            if (section, subsection) != current:
                current = section, subsection
                quoted = "" if subsection is None else ' "{}"'.format(re.sub(r'(["\\])', r"\\\1", subsection))
                lines.append(f"[{section}{quoted}]\n")
            lines.append(f"\t{key}\n" if value is None else f"\t{key} = {_quoted(value)}\n")
    except _ConfigError:
        removed["everything from the first line that is not valid"] = None
    return "".join(lines).encode("utf-8", "surrogateescape"), list(removed)


def _is_harmless(
    section: str, subsection: str | None, key: str, value: str | None, stays_inside: Callable[[str], bool]
) -> bool:
    lowered = key.lower()
    keys = (_KEYS if subsection is None else _SUBSECTION_KEYS).get(section, "")
    if keys != "*" and lowered not in keys.split():
        return False
    if (section, lowered) == ("core", "worktree"):
        return value is not None and stays_inside(value)
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
    for line in content.decode("utf-8", "surrogateescape").split("\n"):
        words = re.split(r"([ \t\r]+)", line)
        bad = [word for word in words if not _is_harmless_attribute(word)]
        removed.update(dict.fromkeys(bad))
        lines.append("".join(word for word in words if word not in bad))
    return "\n".join(lines).encode("utf-8", "surrogateescape"), list(removed)


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


def _key(folder: str) -> bytes:
    return blake2b(folder.encode("utf-8", "surrogateescape"), digest_size=16).digest()
