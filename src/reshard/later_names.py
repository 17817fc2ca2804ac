"""Names of a package that are loaded when they are first used.

A package that offers many names would load all modules that have them, for a program that asks for
two. With its names in a table it loads what is asked for::

    __getattr__, __dir__ = load_later(__name__, {"Plan": "reshard.plans.plan"})

Type checkers do not see through it: such a package imports the same names under `TYPE_CHECKING`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load_later(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package has as `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: its `__name__`.
        modules: the module that has each name; `module:other` where it has another name there.
            A module of the package itself is its own: `"checkpoint": "reshard.checkpoint"`.
        renamed: the new name of each old name, whose use warns.

    >>> load, _ = load_later("reshard", {"Plan": "reshard.plans.plan"})
    >>> load("Plan").__name__
    'Plan'
    """

    def load(name: str) -> Any:
        if renamed is not None and name in renamed:
            import warnings

            new = renamed[name]
            warnings.warn(f"{package}.{name} is now {new}", DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[package], new)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, _, other = modules[name].partition(":")
        module = import_module(path)
        found = module if path == f"{package}.{name}" else getattr(module, other or name)
        setattr(sys.modules[package], name, found)
        return found

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, list_names
