"""The rules of the house: who may import whom, how long a file may be, what it may be called."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import reshard

SOURCE = Path(reshard.__file__).parent
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
MOST_LINES = 500

# A module imports only from lines above its own; names on one line are one layer's parts, and
# the order inside a folder is checked to be free of cycles.
HOUSE = [
    "errors",
    "interning",
    "dtypes",
    "runs",
    "cut_rules",
    "block_rules",
    "rule_text",
    "layout",
    "binding",
    "mesh",
    "topology",
    "sharding",
    "sharding_text",
    "notation",
    "cost",
    "planning",
    "collectives",
    "execution",
    "recipes",
    "torch",
    "checkpoint",
    "spmd",
    "show",
    "cli",
    "testing",
]
ABOVE_THE_PUBLIC_NAMES = {"__main__", "cli"}


def imports_when_loaded(tree: ast.Module) -> Iterator[ast.stmt]:
    """The import statements that run when the module is loaded, type checking left out."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If):
            is_typing = "TYPE_CHECKING" in ast.unparse(statement.test)
            waiting += statement.orelse if is_typing else statement.body + statement.orelse
        elif isinstance(statement, ast.Try):
            waiting += statement.body + statement.orelse + statement.finalbody
            waiting += [inner for handler in statement.handlers for inner in handler.body]
        elif isinstance(statement, ast.ClassDef | ast.With):
            waiting += statement.body


def module_exists(name: str) -> bool:
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imported_modules(tree: ast.Module) -> set[str]:
    """The full names of the package's own modules that a module needs to be loaded."""
    found: set[str] = set()
    for statement in imports_when_loaded(tree):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "imports are absolute"
            base = statement.module or ""
            names = {f"{base}.{alias.name}" for alias in statement.names}
            # `from package import module` needs the module, `from module import name` that one.
            inside = {name for name in names if name.startswith("reshard.") and module_exists(name)}
            found |= inside or {base}
    return {name for name in found if name == "reshard" or name.startswith("reshard.")}


def tree_of(path: Path) -> ast.Module:
    return ast.parse((SOURCE / path).read_text())


def name_of(path: Path) -> str:
    return ".".join(["reshard", *path.with_suffix("").parts]).removesuffix(".__init__")


def line_of(module: str) -> int:
    top = module.split(".")[1]
    return len(HOUSE) if top == "__main__" else HOUSE.index(top)


def test_every_module_has_its_place_in_the_house() -> None:
    tops = {path.parts[0].removesuffix(".py") for path in MODULES} - {"__init__", "__main__"}
    assert tops <= set(HOUSE)


@pytest.mark.parametrize("path", [p for p in MODULES if p.stem != "__init__"], ids=str)
def test_a_module_imports_only_from_lines_above_its_own(path: Path) -> None:
    name = name_of(path)
    imports = imported_modules(tree_of(path))
    if name.split(".")[1] in ABOVE_THE_PUBLIC_NAMES:
        imports.discard("reshard")
    for imported in imports:
        assert imported != "reshard", f"{name} imports the whole package"
        same = imported.split(".")[1] == name.split(".")[1]
        assert same or line_of(imported) < line_of(name), f"{name} imports {imported}"


def test_inside_a_folder_imports_have_an_order() -> None:
    graph = {name_of(path): imported_modules(tree_of(path)) for path in MODULES}
    del graph["reshard"]
    # A folder's __init__ only collects: it stands behind its modules, whoever loads it.
    plain = {name for name in graph if (SOURCE.joinpath(*name.split(".")[1:])).is_dir()}
    order = TopologicalSorter(
        {name: needs - plain - {"reshard"} for name, needs in graph.items() if name not in plain}
    )
    assert list(order.static_order())


def test_the_check_of_imports_sees_what_it_must() -> None:
    program = """
from __future__ import annotations
import reshard.layout as where
from reshard import mesh
from reshard.plans.plan import Plan
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from reshard.cli import main
try:
    from reshard.show import pictures
except ImportError:
    pictures = None
def later():
    from reshard.checkpoint import convert
"""
    assert imported_modules(ast.parse(program)) == {
        "reshard.layout",
        "reshard.mesh",
        "reshard.plans.plan",
        "reshard.show.pictures.text_picture",
    }


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_file_is_too_long(path: Path) -> None:
    assert len((SOURCE / path).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_preconditions_are_exceptions(path: Path) -> None:
    asserts = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    assert not asserts, f"{path} asserts on lines {asserts}"


def test_no_file_is_called_for_what_it_is_not() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert not [path for path in MODULES if path.stem in vague]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_module_with_code_says_what_it_answers(path: Path) -> None:
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree)


def test_no_module_shares_its_name_with_a_public_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules([str(SOURCE)])}
    functions = {name for name in reshard.__all__ if inspect.isfunction(getattr(reshard, name))}
    assert functions
    assert not modules & functions
