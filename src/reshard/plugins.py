"""Plug-ins: formats and recipes that other installed packages provide, by entry points.

A package declares them in its `pyproject.toml`. It is imported when plug-ins of that group are
first needed::

    [project.entry-points."reshard.formats"]
    npy = "reshard_npy:FORMAT"

    [project.entry-points."reshard.recipes"]
    ours = "our_recipes"

A plug-in that fails to import affects nothing else. Its failure is stored, and mentioned in the
error if something is not found that the plug-in might have provided.

Source: the entry points of the Python Packaging User Guide.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from reshard._records import Record

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FORMATS = "reshard.formats"
RECIPES = "reshard.recipes"


class Plugin(Record):
    """An entry point of a package.

    Attributes:
        name: of the entry point.
        package: the name and version of its package.
        value: the loaded object; None if loading failed.
        problem: the failure; empty if there was none.
    """

    name: str
    package: str
    value: Any = None
    problem: str = ""

    def __str__(self) -> str:
        return f"the plug-in {self.name!r} of {self.package}"


@cache
def load_plugins(group: str) -> tuple[Plugin, ...]:
    """Return the plug-ins of a group, by name, and import their packages.

    >>> load_plugins("reshard.nothing")
    ()
    """
    # Most environments have no plug-ins. `importlib.metadata` takes longer to be imported than the
    # rest of a command's start, so it is imported only to load one.
    if not _may_be_declared(group):
        return ()
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=group), key=lambda point: (point.name, point.value))
    return tuple(map(_load, points))


def _may_be_declared(group: str) -> bool:
    """Return whether an installed package declares entry points of a group, or may do so."""
    finders = (finder for finder in sys.meta_path if finder is not PathFinder)
    if any(hasattr(finder, "find_distributions") for finder in finders):
        return True
    for root in dict.fromkeys(sys.path):
        try:
            # An empty entry of `sys.path` is the current folder.
            names = os.listdir(root or os.curdir)
        except NotADirectoryError:
            # A zip file, in which `importlib.metadata` looks too.
            return True
        except OSError:
            continue
        for name in names:
            if name.lower().endswith(("dist-info", "egg-info")):
                try:
                    with open(os.path.join(root, name, "entry_points.txt"), "rb") as file:
                        if f"[{group}]".encode() in file.read():
                            return True
                # Most packages have no entry points.
                except OSError:
                    continue
    return False


def _load(point: EntryPoint) -> Plugin:
    package = "an unknown package"
    if point.dist is not None:
        package = f"{point.dist.name} {point.dist.version}"
    try:
        return Plugin(point.name, package, point.load())
    # A foreign module may raise anything on import, including SystemExit.
    except (Exception, SystemExit) as error:
        return Plugin(point.name, package, problem=f"{type(error).__name__}: {error}")


def describe_broken(plugins: Iterable[Plugin]) -> str:
    """Return a note on plug-ins that failed to load, for an error; empty if there are none.

    >>> describe_broken([Plugin("npy", "reshard-npy 1.0", problem="ImportError: no numpy")])
    "; the plug-in 'npy' of reshard-npy 1.0 is left out (ImportError: no numpy)"
    """
    return "".join(
        f"; {plugin} is left out ({plugin.problem})" for plugin in plugins if plugin.problem
    )
