"""Names of a package that are loaded when they are first used."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path

import pytest

from reshard._lazy import attach

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts[:-1])
    for path in sorted((SOURCE / "reshard").rglob("__init__.py"))
    if "attach(" in path.read_text()
]


def names_of(package: str) -> list[str]:
    """The names in the table that a package gives, as it is written."""
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (found,) = (call for call in calls if ast.unparse(call.func) == "attach")
    names = vars(importlib.import_module(package))
    tables = [eval(ast.unparse(table), {**names}) for table in found.args[1:]]
    listed = [text for table in tables for names in table.values() for text in names]
    return [text.rpartition(" as ")[2] for text in listed]


def test_packages_with_lazy_names_are_found() -> None:
    assert {"reshard", "reshard.checkpoint", "reshard.recipes"} <= {*PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_there_and_listed(package: str) -> None:
    module = importlib.import_module(package)
    for name in names_of(package):
        assert getattr(module, name) is not None
        assert name in dir(module)
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_a_name_is_loaded_once() -> None:
    package = types.ModuleType("later_names_example")
    sys.modules[package.__name__] = package
    try:
        table = {"ast": ["parse", "parse as tree"]}
        load, list_names = attach(package.__name__, table)
        assert load("parse") is load("tree") is vars(package)["tree"]
        assert {"parse", "tree"} <= {*list_names()}
    finally:
        del sys.modules[package.__name__]


def test_another_name_is_an_attribute_error() -> None:
    load, _ = attach("reshard", {})
    with pytest.raises(AttributeError, match="module 'reshard' has no attribute 'nothing'"):
        load("nothing")
