"""The tests that a change of one package can break: python tools/part_tests.py PACKAGE

Prints the test files, doctest modules and pages whose imports reach the package, a path a line,
for `make test PART=PACKAGE`. The graph of imports is that of import-linter (grimp), with edges for
what runs without an import statement:

1. names that a package loads when they are first used count as imports of the module that has
   them, so `import reshard` reaches nothing, and `reshard.plan` reaches `reshard.plans.plan`;
2. a module that is named in a string is imported: registries load by name;
3. a test that names a script in a string runs it;
4. a page imports what its snippets do, and a command on it runs that command's module.
"""

from __future__ import annotations

import ast
import doctest
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = "reshard"
SCRIPT_FOLDERS = ("tests", "tools", "examples", "benchmarks")
PAGES = ("README.md", "docs/**/*.md")


@functools.cache
def source_of(module: str) -> Path | None:
    """Return the file of a module of the library, or None if there is no such module."""
    path = ROOT / "src" / Path(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def lazy_names(module: str) -> dict[str, str]:
    """Return the modules of the names that a package loads when they are first used (PEP 562)."""
    file = source_of(module)
    calls = [] if file is None or file.name != "__init__.py" else ast.walk(parse(file))
    for node in calls:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "attach":
            tables = [table for table in node.args[1:] if isinstance(table, ast.Dict)]
            return {
                (own := name.value.rpartition(" as ")[2]): (
                    f"{module}.{own}" if key.value == module else key.value
                )
                for table in tables
                for key, names in zip(table.keys, table.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(names, ast.List)
                for name in names.elts
                if isinstance(name, ast.Constant)
            }
    return {}


def resolve(name: str) -> tuple[str, bool] | None:
    """Return the module that a dotted name of the library belongs to, and whether it is all of it.

    `reshard.plan` is of `reshard.plans.plan`, `reshard.checkpoint` is all of that package, and
    `reshard.__file__` is of `reshard`. None for a name of another package.
    """
    module, *rest = name.split(".")
    if module != PACKAGE:
        return None
    for i, part in enumerate(rest):
        below = f"{module}.{part}"
        if source_of(below) is None:
            return lazy_names(module).get(part, module), False
        if lazy_names(module).get(part, below) != below:
            return lazy_names(module)[part], i == len(rest) - 1
        module = below
    return module, True


def dotted_name(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """Return the name that a chain of attributes stands for where it begins with an import."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value, aliases)
        return None if base is None else f"{base}.{node.attr}"
    return None


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of the library and of test modules that a program uses."""
    nodes = [*ast.walk(tree)]
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
                yield f"{alias.name}.__name__"  # a package alone, without its lazy names
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    # Only the outermost attribute of a chain is the name that is used.
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            name = dotted_name(node, aliases)
            yield from [] if name is None else [name]


def strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def scripts() -> dict[str, list[Path]]:
    """Return the programs outside the library by file name, and by the name that imports them."""
    found: dict[str, list[Path]] = {}
    for folder in SCRIPT_FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            found.setdefault(path.name, []).append(path)
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.setdefault(".".join(parts).removesuffix(".__init__"), []).append(path)
    return found


def uses(tree: ast.Module) -> tuple[set[str], list[Path]]:
    """Return the names of the library that a program uses, and the programs that it may run."""
    names = {*imported_names(tree)}
    texts = {*strings(tree)}
    library = {name for name in names if name.split(".")[0] == PACKAGE}
    library |= {text for text in texts if re.fullmatch(r"reshard(\.\w+)+", text)}
    keys = {part for name in names - library for part in (name, name.rpartition(".")[0])}
    keys |= {text.split("/")[-1] for text in texts if re.fullmatch(r"[\w./-]+\.py", text)}
    return library, [path for key in sorted(keys) for path in scripts().get(key, [])]


def page_program(text: str) -> str:
    """Return the Python of a page: its doctests and its fenced programs that parse."""
    programs = [example.source for example in doctest.DocTestParser().get_examples(text)]
    for program in re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if ">>>" not in program:
            programs.append(program)
    return "\n".join(program for program in programs if is_python(program))


def is_python(program: str) -> bool:
    try:
        ast.parse(program)
    except SyntaxError:
        return False
    return True


def page_commands(text: str) -> Iterator[str]:
    for command in re.findall(r"^\$ reshard (\w+)", text, re.MULTILINE):
        yield f"{PACKAGE}.cli.commands.{command}"


@functools.cache
def build_graph() -> grimp.ImportGraph:
    """Return the imports of the library, with those of registries, without those of lazy names."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for module in [*graph.modules]:
        if lazy_names(module):
            for imported in graph.find_modules_directly_imported_by(module):
                graph.remove_import(importer=module, imported=imported)
        else:
            file = source_of(module)
            text = "" if file is None else file.read_text()
            for named in {*re.findall(r'"(reshard(?:\.\w+)+)[:"]', text)} & graph.modules:
                graph.add_import(importer=module, imported=named)
    return graph


class Reach:
    """The modules of the library that reach a package, and the files that reach these."""

    def __init__(self, part: str) -> None:
        graph = build_graph()
        target = f"{PACKAGE}.{part}"
        if target not in graph.modules:
            raise SystemExit(f"no package {part!r}: {', '.join(list_parts(graph))}")
        inside = {target, *graph.find_descendants(target)}
        self.modules = inside | graph.find_downstream_modules(target, as_package=True)
        self.seen: dict[Path, bool] = {}

    def is_reached_by_name(self, name: str) -> bool:
        """Return whether a dotted name of the library is of a module that reaches the package."""
        resolved = resolve(name)
        if resolved is None:
            return False
        module, is_whole = resolved
        lazy = lazy_names(module).values() if is_whole else ()
        return module in self.modules or any(below in self.modules for below in lazy)

    def reaches(self, file: Path) -> bool:
        """Return whether a program, or what it imports or runs, reaches the package."""
        if file not in self.seen:
            self.seen[file] = False  # for programs that import each other
            self.seen[file] = self.program_reaches(parse(file))
        return self.seen[file]

    def program_reaches(self, tree: ast.Module) -> bool:
        names, programs = uses(tree)
        return any(map(self.is_reached_by_name, names)) or any(map(self.reaches, programs))

    def files(self) -> Iterator[Path]:
        yield from (
            path for path in sorted((ROOT / "tests").rglob("test_*.py")) if self.reaches(path)
        )
        for module in sorted(self.modules):
            file = source_of(module)
            if file is not None and ">>> " in file.read_text():
                yield file
        pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
        for page in pages:
            text = page.read_text()
            named = any(command in self.modules for command in page_commands(text))
            if ">>> " in text and (named or self.program_reaches(ast.parse(page_program(text)))):
                yield page
        for program in sorted((ROOT / "examples").glob("*.py")):
            if ">>> " in program.read_text() and self.reaches(program):
                yield program


def list_parts(graph: grimp.ImportGraph) -> list[str]:
    """Return the packages of the library as they are given to `make test PART=`."""
    packages = (name for name in graph.modules if graph.find_children(name) and name != PACKAGE)
    return sorted(name.removeprefix(f"{PACKAGE}.") for name in packages)


if __name__ == "__main__":
    for part in sys.argv[1:]:
        for file in Reach(part.strip("/").replace("/", ".")).files():
            print(file.relative_to(ROOT))
