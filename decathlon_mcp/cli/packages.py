"""Whether the installed packages have the versions that the project needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from decathlon_mcp.sandboxes.base import Finding, finding

PROJECT = "decathlon-mcp"
SERVER = "server"
"""The extra that every server needs."""
CURE = (
    "install decathlon-mcp in an environment of its own, apart from trainers: "
    "python3 -m venv .venv && .venv/bin/pip install '.[server,starter]'"
)
MAX_SHOWN = 8


def check_packages(project: str = PROJECT) -> Finding:
    """Compare every installed package with what the project, and what it needs, require of it. Blocks.

    Extras count if all that they name is installed; `server` counts in any case.
    """
    checked, problems = _check(project)
    if problems:
        shown = problems[:MAX_SHOWN]
        more = [f"{len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        detail = "\n".join([f"{len(problems)} not as needed", *shown, *more])
    else:
        detail = f"{checked} installed, all as needed"
    return finding("packages", not problems, detail, CURE, required=False)


def _check(project: str) -> tuple[int, list[str]]:
    """The number of packages, and a line for each requirement that is not met."""
    own = _find(project)
    if own is None:
        return 0, [f"{project} is not installed as a package, so nothing says what it needs"]
    extras = own.metadata.get_all("Provides-Extra") or []
    todo = [(own, frozenset({SERVER, *(extra for extra in extras if _is_installed(own, extra))}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    problems: list[str] = []
    while todo:
        package, wanted = todo.pop()
        name = canonicalize_name(package.name)
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for requirement in _requirements(package, wanted):
            found = _find(requirement.name)
            if found is None:
                problems.append(f"{requirement.name} is not installed: {name} needs it")
            elif not requirement.specifier.contains(found.version, prereleases=True):
                problems.append(f"{requirement.name} {found.version}: {name} needs {requirement.specifier}")
            if found is not None:
                todo.append((found, frozenset(requirement.extras)))
    return len({name for name, _ in seen}), sorted(set(problems))


def _is_installed(package: Distribution, extra: str) -> bool:
    without = {str(requirement) for requirement in _requirements(package, ())}
    own = [requirement for requirement in _requirements(package, (extra,)) if str(requirement) not in without]
    return all(_find(requirement.name) is not None for requirement in own)


def _requirements(package: Distribution, extras: Collection[str]) -> Iterator[Requirement]:
    """The package's requirements on this machine, with the requirements of its extras."""
    for text in package.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # of some old packages; pip ignores it too
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
