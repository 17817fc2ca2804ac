"""The rules of the house, of which the order of imports is held by the contracts of import-linter.

What breaks a rule and may is in `house_exceptions.toml`, with the reason.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import reshard

SOURCE = Path(reshard.__file__).parent
ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
HOUSE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"

MOST_FILES_OF_AN_ADDITION = {"recipe": 2, "notation": 2}
DIALECT = {
    "one": r"\bone\b",
    "says_tells": r"\b(tells?|told|says?|said)\b",
    "behind": r"\bbehind\b",
    "beside": r"\bbeside\b",
    "sentence_with_what": r"(^|\n|\. )What ",
    "none_where": r"\bNone where\b",
    "has_not_is_no": r"\b(has|have) not\b|\b(is|has) no\b",
    "likewise": r"\blikewise\b",
}
LIVE = {"torch", "spmd"}
DIALECT_COUNTS = TESTS / "dialect_counts.toml"
DIALECT_COUNTS_HEADER = (
    "# Uses in 10,000 words of docstrings and comments, kept by test_house.py from rising.\n"
    "# RESHARD_UPDATE_GOLDEN=1 records them."
)
EXCEPTIONS = tomllib.loads((TESTS / "house_exceptions.toml").read_text())


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The modules of the library by their paths below its folder."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in paths}


def folders() -> list[Path]:
    """The folders with modules, the root apart."""
    return [path.parent for path in trees() if path.name == "__init__.py" and path.parent.parts]


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it, without their expressions."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            yield from walk_statements(child)


@functools.cache
def count_uses(path: Path) -> Counter[str]:
    """Return how often each habit occurs in a module's docstrings and comments, and their words."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in walk_statements(trees()[path]) if isinstance(node, documented))
    comments = re.findall(r"^\s*# .*|  # .*", (SOURCE / path).read_text(), re.MULTILINE)
    prose = "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *comments])
    uses = {habit: len(re.findall(pattern, prose)) for habit, pattern in DIALECT.items()}
    return Counter(uses | {"words": len(re.findall(r"\w+", prose))})


def count_dialect(paths: Iterable[Path]) -> dict[str, float]:
    """Return the uses of each habit that STYLE names in 10,000 words of the modules."""
    uses = sum((count_uses(path) for path in paths), Counter[str]())
    return {habit: round(10_000 * uses[habit] / uses["words"], 1) for habit in DIALECT}


def format_census() -> str:
    """Return modules, classes and the dialect of each package as a table."""
    packages: dict[str, list[Path]] = {}
    for path in trees():
        packages.setdefault(path.parts[0] if len(path.parts) > 1 else "(root)", []).append(path)
    lines = [f"{'package':12} modules classes  " + "  ".join(DIALECT)]
    for package, paths in sorted(packages.items()):
        nodes = (node for path in paths for node in walk_statements(trees()[path]))
        classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
        rates = (f"{rate:{len(habit)}}" for habit, rate in count_dialect(paths).items())
        lines.append(f"{package:12} {len(paths):7} {classes:7}  " + "  ".join(rates))
    return "\n".join(lines)


def test_the_dialect_does_not_grow(record_property: Callable[[str, object], None]) -> None:
    """Uses in 10,000 words; a lower count is recorded by `RESHARD_UPDATE_GOLDEN=1`."""
    record_property("census", format_census())
    areas = {
        "live": count_dialect(path for path in trees() if path.parts[0] in LIVE),
        "rest": count_dialect(path for path in trees() if path.parts[0] not in LIVE),
    }
    if "RESHARD_UPDATE_GOLDEN" in os.environ:
        lines = [f"{area}.{key} = {rates[key]}" for area, rates in areas.items() for key in rates]
        DIALECT_COUNTS.write_text("\n".join([DIALECT_COUNTS_HEADER, *lines, ""]))
    recorded = tomllib.loads(DIALECT_COUNTS.read_text())
    risen = {
        f"{area}.{habit}": (recorded[area][habit], rate)
        for area, rates in areas.items()
        for habit, rate in rates.items()
        if rate > recorded[area][habit]
    }
    assert not risen


def test_every_folder_has_an_init() -> None:
    assert {path.parent for path in trees()} == {Path(), *folders()}


def test_every_folder_says_what_is_in_it() -> None:
    documents = {folder: ast.get_docstring(trees()[folder / "__init__.py"]) for folder in folders()}
    silent = {str(path) for path, text in documents.items() if len((text or "").split("\n")) < 2}
    assert not silent


def test_every_module_opens_with_its_topic() -> None:
    """The first line is no question; that may follow."""
    openings = {
        path: (ast.get_docstring(tree) or "").split("\n")[0] for path, tree in trees().items()
    }
    wrong = {str(path) for path, line in openings.items() if not line or line.endswith("?")}
    assert not wrong


def calls_by_name(tree: ast.Module) -> Iterator[ast.Call]:
    """Imports of modules whose names are not another package's, as written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(
            r"\b(import_module|__import__)$", ast.unparse(node.func)
        ):
            name = node.args[0]
            is_constant = isinstance(name, ast.Constant) and isinstance(name.value, str)
            if not is_constant or name.value.split(".")[0] == "reshard":
                yield node


def test_only_registries_import_by_name() -> None:
    found = {str(path) for path, tree in trees().items() if any(calls_by_name(tree))}
    assert found == {*EXCEPTIONS["registries"]}


def test_imports_by_name_are_seen() -> None:
    program = "import_module('torch')\nimport_module(name)\nimportlib.import_module('reshard.x')"
    assert len([*calls_by_name(ast.parse(program))]) == 2


@functools.cache
def named_by(package: str) -> frozenset[str]:
    """Return the names in a package's `__all__`; empty for a module."""
    tree = trees().get(Path(*package.split(".")[1:]) / "__init__.py", ast.Module([], []))
    listed = [node for node in tree.body if isinstance(node, ast.Assign)]
    (names,) = [node for node in listed if ast.unparse(node.targets[0]) == "__all__"] or [None]
    return frozenset(ast.literal_eval(names.value) if names is not None else ())


def imports_from_others(path: Path, own: str) -> Iterator[tuple[str, str]]:
    """Yield the module and name of each import from a package of reshard other than `own`."""
    for node in ast.walk(trees()[path]):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("reshard."):
            continue
        module = str(node.module)
        # Modules of the root are the base of all packages.
        folder = SOURCE.parent / module.replace(".", "/")
        is_of_root = module.count(".") == 1 and not folder.is_dir()
        if module.split(".")[1] != own and not is_of_root:
            yield from ((module, alias.name) for alias in node.names)


def defines(module: str, name: str) -> bool:
    """Return whether a module of the library or of the tests has a name or a submodule."""
    if module.startswith("reshard"):
        try:
            has_name = hasattr(importlib.import_module(module), name)
            return has_name or importlib.util.find_spec(f"{module}.{name}") is not None
        except ModuleNotFoundError as error:
            # A module may need an engine, which is not in this environment.
            return not str(error.name).startswith("reshard")
    # Modules of tests may need another environment, so they are read and not imported.
    path = TESTS.joinpath(*module.split("."))
    if path.is_dir():
        return (path / name).with_suffix(".py").exists() or (path / name).is_dir()
    if not (file := path.with_suffix(".py")).exists():
        return False
    tree = ast.parse(file.read_text())
    defined = {getattr(node, "name", None) or getattr(node, "id", None) for node in ast.walk(tree)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    return name in defined | imported


def test_scripts_of_other_environments_import_what_exists() -> None:
    """Engines and benchmarks run elsewhere and seldom, so a moved name would not be noticed."""
    own = {path.stem for path in TESTS.iterdir()} - {"torch", "megatron"} | {"reshard"}
    missing = []
    for folder in (TESTS / "engines", ROOT / "benchmarks", ROOT / "examples", ROOT / "tools"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or node.level:
                    continue
                if str(node.module).split(".")[0] in own:
                    missing += [
                        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
                        for alias in node.names
                        if not defines(str(node.module), alias.name)
                    ]
    assert not missing


def test_spmd_imports_only_what_packages_name() -> None:
    """A name is in the `__all__` of its package, or of a package that contains that."""
    private = {
        f"{module}.{name}"
        for path in trees()
        if path.parts[0] == "spmd"
        for module, name in imports_from_others(path, "spmd")
        if not any(
            name in named_by(".".join(parts[:depth]))
            for parts in [module.split(".")]
            for depth in range(1, len(parts) + 1)
        )
    }
    assert not private


def test_preconditions_are_exceptions() -> None:
    asserts = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not asserts


def test_no_file_is_called_for_what_it_is_not() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert not [path for path in trees() if path.stem in vague]


def test_no_module_shares_its_name_with_a_public_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules([str(SOURCE)])}
    functions = {name for name in reshard.__all__ if inspect.isfunction(getattr(reshard, name))}
    assert functions
    assert not modules & functions


def test_tests_lie_as_what_they_test() -> None:
    """A test in a folder that the library has names a module or folder there."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        place = path.relative_to(TESTS)
        folder, name = SOURCE / place.parent, place.stem.removeprefix("test_")
        modules = (folder / f"{name}.py", folder / f"_{name}.py")
        is_there = (folder / name).is_dir() or any(module.exists() for module in modules)
        if folder.is_dir() and not is_there:
            found.add(str(place))
    assert found - {*EXCEPTIONS["tests_of_more_than_a_module"]} == set()


def test_the_quick_check_names_what_there_is() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^QUICK := (.*)$", text, re.MULTILINE)
    names = re.findall(r"(?:tests|docs|examples|README)[\w./]*(?![\w./*])", line)
    assert len(names) > 20
    assert not [name for name in names if not (ROOT / name).exists()]
    for file, function in re.findall(r"(\S+\.py)::(\w+)", line):
        assert f"def {function}(" in (ROOT / file.strip('"')).read_text()


def drawing() -> str:
    (text,) = re.findall(r"^```text\n(.*?)^```", HOUSE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


def test_every_folder_is_on_the_drawing() -> None:
    """A folder of the root begins a line; the folders in it follow, before the next such line."""
    drawn: dict[str, set[str]] = {}
    for line in drawing().splitlines():
        names = re.findall(r"(\w+)/", line)
        if names and not line.startswith(" "):
            drawn[top := names.pop(0)] = set()
        if names:
            drawn[top] |= {*names}
    there: dict[str, set[str]] = {}
    for folder in folders():
        there.setdefault(folder.parts[0], set()).update(folder.parts[1:])
    assert drawn == there


def test_every_module_of_the_root_is_on_the_drawing() -> None:
    modules = {path.stem for path in trees() if len(path.parts) == 1} - {"__init__", "__main__"}
    assert modules <= {*re.findall(r"\w+", drawing())}


def test_the_house_names_files_that_exist() -> None:
    named = re.findall(r"`((?:src|tests|docs|examples)/[\w./*]+)`", HOUSE.read_text())
    assert len(named) > 10
    to_write = {name for name in named if "/yours." in name}
    assert not {name for name in named if not [*ROOT.glob(name)]} - to_write


def test_additions_open_few_files() -> None:
    """Each answer names its files in a list, and the test that makes the addition."""
    sections = re.split(r"^### ", HOUSE.read_text(), flags=re.MULTILINE)[1:]
    assert [section.split("\n")[0].split()[-1] for section in sections] == [
        *("format", "option", "recipe", "operator", "notation", "senders")
    ]
    for section in sections:
        title, _, text = section.partition("\n")
        files = re.findall(r"^\d\. `([^`]+)`", text, re.MULTILINE)
        most = MOST_FILES_OF_AN_ADDITION.get(title.split()[-1], 5)
        assert 0 < len(files) <= most, title
        assert re.search(r"`tests/[\w/]*/test_adding_an?_\w+\.py`", text), title


def test_the_glossary_is_sorted_and_used() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*", GLOSSARY.read_text(), re.MULTILINE)
    assert len(terms) >= 20
    assert terms == sorted(terms, key=str.lower)
    assert len({*terms}) == len(terms)
    words = "\n".join((SOURCE / path).read_text().lower() for path in trees())
    assert not [term for term in terms if not re.search(rf"\b{term.lower()}", words)]


def test_guarantees_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 30
    for file, function in named:
        text = (TESTS / file).read_text()
        assert not function or f"def {function}(" in text, f"{file}::{function}"
