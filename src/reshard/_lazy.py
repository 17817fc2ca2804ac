"""Lazy public names of a package (PEP 562), so that importing the package stays fast.

A package gives the names that each module defines, and each is imported on first access::

    __getattr__, __dir__ = attach(__name__, {"reshard.plans.plan": ["Plan", "plan"]})

Type checkers do not follow the table: the package repeats the imports under `TYPE_CHECKING`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(
    package: str,
    *tables: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: the package's `__name__`.
        tables: the names by the module that defines them, as in `from module import name`:
            `"other as name"` if it has another name there, and the package itself for a submodule.
        renamed: the new name of each deprecated name; access by the old name warns.

    >>> load, _ = attach("reshard", {"reshard.plans.plan": ["Plan"]})
    >>> load("Plan").__name__
    'Plan'
    """
    modules: dict[str, tuple[str, str]] = {}
    for module, names in itertools.chain.from_iterable(table.items() for table in tables):
        for text in names:
            other, _, name = text.partition(" as ")
            modules[name or other] = module, other

    def load(name: str) -> Any:
        if renamed is not None and name in renamed:
            import warnings

            new = renamed[name]
            warnings.warn(f"{package}.{name} is now {new}", DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[package], new)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, other = modules[name]
        if module == package:
            value = import_module(f"{package}.{other}")
        else:
            value = getattr(import_module(module), other)
        # Python calls a module's `__getattr__` only for missing names, so the next access takes no
        # lookup.
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, list_names
