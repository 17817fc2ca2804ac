"""Lazy public names of a package (PEP 562), so that importing the package stays fast.

A package gives the module of each name in a table, and each is imported on first access::

    __getattr__, __dir__ = attach(__name__, {"Plan": "reshard.plans.plan"})

Type checkers do not follow the table: the package repeats the imports under `TYPE_CHECKING`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: the package's `__name__`.
        modules: the module that defines each name; `module:other` if it has another name there.
            A submodule is mapped to itself: `"checkpoint": "reshard.checkpoint"`.
        renamed: the new name of each deprecated name; access by the old name warns.

    >>> load, _ = attach("reshard", {"Plan": "reshard.plans.plan"})
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
        value = module if path == f"{package}.{name}" else getattr(module, other or name)
        # Python calls a module's `__getattr__` only for missing names, so the next access takes no
        # lookup.
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, list_names
