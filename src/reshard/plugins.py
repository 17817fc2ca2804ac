"""Plug-ins: what other installed packages add to reshard, by their entry points.

A package names what it adds in its own `pyproject.toml`, and is installed; nothing is imported
from it before somebody asks for things of that kind::

    [project.entry-points."reshard.formats"]
    npy = "reshard_npy:FORMAT"

    [project.entry-points."reshard.recipes"]
    ours = "our_recipes"

A plug-in that fails breaks no other, and nothing of reshard: it is remembered with what it failed
of, and the error of whoever looks for what it would have added says so.

Source: the entry points of the Python Packaging User Guide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

FORMATS = "reshard.formats"
RECIPES = "reshard.recipes"


@dataclass(frozen=True)
class Plugin:
    """An entry point of a package.

    Attributes:
        name: of the entry point.
        package: the name and version of the package that has it.
        value: what it stands for; None if it could not be loaded.
        problem: why not; empty if it was.
    """

    name: str
    package: str
    value: Any = None
    problem: str = ""

    def __str__(self) -> str:
        return f"the plug-in {self.name!r} of {self.package}"


@cache
def load_plugins(group: str) -> tuple[Plugin, ...]:
    """The plug-ins of a group, by name; the packages that have them are imported.

    >>> load_plugins("reshard.nothing")
    ()
    """
    points = sorted(entry_points(group=group), key=lambda point: (point.name, point.value))
    return tuple(map(_load, points))


def _load(point: EntryPoint) -> Plugin:
    package = "an unknown package"
    if point.dist is not None:
        package = f"{point.dist.name} {point.dist.version}"
    try:
        return Plugin(point.name, package, point.load())
    # Whatever a stranger's module raises while it is imported, a SystemExit included.
    except (Exception, SystemExit) as error:
        return Plugin(point.name, package, problem=f"{type(error).__name__}: {error}")


def describe_broken(plugins: Iterable[Plugin]) -> str:
    """What to add to an error where plug-ins could not be loaded; empty where all could.

    >>> describe_broken([Plugin("npy", "reshard-npy 1.0", problem="ImportError: no numpy")])
    "; the plug-in 'npy' of reshard-npy 1.0 is left out (ImportError: no numpy)"
    """
    return "".join(f"; {one} is left out ({one.problem})" for one in plugins if one.problem)
