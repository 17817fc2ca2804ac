"""Engine layouts as JSON documents and files.

Layers and ranks repeat, so a document stores each thing once, and refers to it by number::

    {"reshard": "engine-layout", "version": 1, "engine": ..., "mesh": ...,
     "names":    [all names],
     "kinds":    [dtype and shape of sources],
     "columns":  [columns of numbers],
     "patterns": [ways to fill a parameter, their columns by number],
     "sources":  [column of names, column of kinds],
     "ranks":    [parameters: columns of names, of patterns and of the names of their sources]}

The names of a model's tensors differ by the numbers of layers and experts. They are sorted by their
text without numbers, and written as this text and a column for each number::

    ["layers.{}.experts.{}.up.weight", [[0, 0, 64, 1, 2]], [[0, 1, 64, 0, 2]]]

is 128 names, of 2 layers with 64 experts. Everything is checked when it is read; an invalid
document is an error of `reshard.errors`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reshard.binding import View
from reshard.errors import NotationError, RecipeError, ReshardError
from reshard.layout import Box
from reshard.plans.documents import (
    DocumentReader,
    DocumentWriter,
    pack_column,
    read_dtype,
    read_int,
    read_ints,
    read_json,
    read_strings,
    unpack_column,
)
from reshard.plans.serialization import from_json
from reshard.recipes.engine_layouts.engine_layout import (
    METHODS,
    EngineLayout,
    RankLayout,
    SourceTensor,
)
from reshard.recipes.engine_layouts.parameter_layout import (
    Computed,
    Constant,
    ParameterLayout,
    ParameterPattern,
    PieceColumns,
)
from reshard.runs import IntArray

# Only numbers in the form of `str` are restored exactly: `01` would become `1`.
_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)")


def sort_names(names: Iterable[str]) -> list[str]:
    """Return the names, each once, in the order in which they are written.

    >>> sort_names(["a.10", "b", "a.9"])
    ['a.9', 'a.10', 'b']
    """
    return sorted(set(names), key=split_numbers)


def split_numbers(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a name with `{}` for its numbers, and the numbers.

    >>> split_numbers("layers.3.w2.weight")
    ('layers.{}.w{}.weight', (3, 2))
    """
    # A brace of the name's own would be read as a number's place.
    if "{" in name or "}" in name:
        return name, ()
    return _NUMBER.sub("{}", name), tuple(map(int, _NUMBER.findall(name)))


def write_names(names: list[str]) -> list[Any]:
    """Return names in the order of `sort_names`, as JSON for `read_names`."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        template, numbers = split_numbers(name)
        groups.setdefault(template, []).append(numbers)
    written: list[Any] = []
    for template, rows in groups.items():
        if len(rows) == 1:
            written.append(template.format(*rows[0]) if rows[0] else template)
        else:
            written.append([template, *(pack_column(column) for column in zip(*rows, strict=True))])
    return written


def read_names(written: object, where: str) -> list[str]:
    """Return the names that were written. Raises NotationError for other values.

    >>> read_names(["a", ["b.{}.c", [[3, 1, 2]]]], "names")
    ['a', 'b.3.c', 'b.4.c']
    """
    if not isinstance(written, list):
        raise NotationError(f"{where}: {written!r} is not a list of names")
    names: list[str] = []
    for number, entry in enumerate(written):
        if isinstance(entry, str):
            names.append(entry)
            continue
        if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[0], str):
            raise NotationError(f"{where}[{number}]: {entry!r} is not a name with its numbers")
        template, *columns = entry
        numbers = [unpack_column(column, f"{where}[{number}]").tolist() for column in columns]
        pieces = template.split("{}")
        if len(pieces) != len(columns) + 1 or len({len(column) for column in numbers}) != 1:
            raise NotationError(
                f"{where}[{number}]: {len(columns)} columns of {[len(c) for c in numbers]} numbers "
                f"for {template!r}"
            )
        # A format with %d is the quickest way to fill in numbers.
        fill = "%d".join(piece.replace("%", "%%") for piece in pieces)
        names += [fill % row for row in zip(*numbers, strict=True)]
    return names


def write_document(layout: EngineLayout) -> str:
    """Return the JSON document of an engine's layout; equal layouts have equal documents."""
    columns: dict[bytes, int] = {}
    number_column = partial(_number_column, columns)
    names = sort_names(
        [*layout.sources, *(name for rank in layout.ranks for name in rank.parameters)]
    )
    number_of = {name: number for number, name in enumerate(names)}
    kinds: dict[SourceTensor, int] = {}
    of_sources = sorted(layout.sources, key=number_of.__getitem__)
    source_kinds = [kinds.setdefault(layout.sources[name], len(kinds)) for name in of_sources]
    patterns: dict[ParameterPattern, int] = {}
    cached: dict[tuple[str, ...], IntArray] = {}

    def number_names(some: tuple[str, ...]) -> IntArray:
        if some not in cached:
            cached[some] = np.array([number_of[name] for name in some], dtype=np.int64)
        return cached[some]

    ranks = []
    for rank in layout.ranks:
        parameters = list(rank.parameters.values())
        lists = [number_names(parameter.sources) for parameter in parameters]
        written: dict[str, Any] = {
            "rank": rank.rank,
            "names": number_column([number_of[name] for name in rank.parameters]),
            "patterns": number_column(
                [patterns.setdefault(parameter.pattern, len(patterns)) for parameter in parameters]
            ),
            "sources": number_column(np.concatenate(lists) if lists else []),
            "unread": number_column([number_of[name] for name in rank.unread]),
        }
        if rank.method != METHODS[0]:
            written["method"] = rank.method
        if rank.tied:
            written["tied"] = [list(group) for group in rank.tied]
        if rank.notes:
            written["notes"] = list(rank.notes)
        ranks.append(written)
    content = {
        "engine": layout.engine,
        "engine_version": layout.version,
        "mesh": DocumentWriter.mesh(layout.mesh),
        "notes": list(layout.notes),
        "names": write_names(names),
        "kinds": [[kind.dtype.name, list(kind.shape)] for kind in kinds],
        "sources": [
            number_column([number_of[name] for name in of_sources]),
            number_column(source_kinds),
        ],
        "patterns": [_write_pattern(pattern, number_column) for pattern in patterns],
        "ranks": ranks,
    }
    # The columns come last, since writing all else numbers them.
    written_columns = [pack_column(np.frombuffer(c, np.int64).tolist()) for c in columns]
    return DocumentWriter().document(
        EngineLayout.document_kind, {**content, "columns": written_columns}
    )


def _number_column(columns: dict[bytes, int], column: Iterable[int] | IntArray) -> int:
    """Return the number of a column in the document, to which it is added once."""
    values = np.ascontiguousarray(column, dtype=np.int64)
    return columns.setdefault(values.tobytes(), len(columns))


def _write_pattern(
    pattern: ParameterPattern, number_column: Callable[[IntArray], int]
) -> dict[str, Any]:
    own = pattern.columns
    written: dict[str, Any] = {"dtype": pattern.dtype.name, "shape": list(pattern.shape)}
    if len(own.source):
        # Most ranks differ only in the offsets of their regions.
        first = int(own.offset[0])
        written["first"] = first
        written["pieces"] = [
            number_column(column)
            for column in (
                *own.start.T,
                *own.stop.T,
                *own.strides.T,
                own.source,
                own.offset - first,
                own.steps,
            )
        ]
    if pattern.steps != ((),):
        written["steps"] = [list(steps) for steps in pattern.steps]
    if pattern.computed:
        written["computed"] = [
            [
                _write_box(region.box),
                list(region.operations),
                list(region.sources),
                *([] if region.view is None else [region.view.offset, list(region.view.strides)]),
            ]
            for region in pattern.computed
        ]
    if pattern.constants:
        # NaN and infinities are not JSON numbers.
        written["constants"] = [
            [_write_box(constant.box), repr(constant.value)] for constant in pattern.constants
        ]
    if pattern.unfilled:
        written["unfilled"] = [_write_box(box) for box in pattern.unfilled]
    return written


def _write_box(box: Box) -> list[list[int]]:
    return [list(box.start), list(box.stop)]


def read_document(reader: DocumentReader) -> EngineLayout:
    """Return the engine's layout of a document.

    Raises:
        ReshardError: a document that is not such a layout.
    """
    return _LayoutReader(reader).read()


class _LayoutReader:
    """A document's columns, names and patterns, by number."""

    def __init__(self, reader: DocumentReader) -> None:
        self.reader = reader
        self.columns = reader.all_of("columns", lambda value, where: unpack_column(value, where))
        self.names = np.array(read_names(reader.field("names", list), "names"), dtype=object)
        self.kinds = reader.all_of("kinds", _read_kind)
        self.patterns = reader.all_of("patterns", self._read_pattern)
        # Ranks with equal parameters share a tuple of names for each.
        self.known: dict[tuple[int, bytes], list[tuple[str, ...]]] = {}

    def read(self) -> EngineLayout:
        """Return the engine's layout."""
        field = self.reader.field
        engine, version = field("engine", str), field("engine_version", str)
        written = field("sources", list)
        if len(written) != 2:
            raise NotationError(f"sources: {len(written)} columns; expected names and kinds")
        names = self._names_of(written[0], "sources")
        kinds = [
            self.reader.chosen(self.kinds, number, "sources")
            for number in self._column(written[1], "sources").tolist()
        ]
        if len(kinds) != len(names):
            raise NotationError(f"sources: {len(names)} names and {len(kinds)} kinds")
        ranks = self.reader.all_of("ranks", self._read_rank)
        sources = dict(zip(names, kinds, strict=True))
        return EngineLayout(
            engine,
            version,
            self.reader.mesh(field("mesh", dict), "mesh"),
            sources,
            ranks,
            self._notes(None),
        )

    def _notes(self, of: dict[str, Any] | None) -> tuple[str, ...]:
        return tuple(read_strings(self.reader.field("notes", list, [], of=of), "notes"))

    def _column(self, number: object, where: str) -> IntArray:
        return self.reader.chosen(self.columns, number, where)

    def _names_of(self, number: object, where: str) -> list[str]:
        column = self._column(number, where)
        if len(column) and (column.min() < 0 or column.max() >= len(self.names)):
            raise NotationError(f"{where}: a name of {len(self.names)} that is not there")
        names: list[str] = self.names[column].tolist()
        return names

    def _read_rank(self, value: Any, where: str) -> RankLayout:
        read_json(value, dict, where)
        names = self._names_of(value.get("names"), f"{where}.names")
        patterns = [
            self.reader.chosen(self.patterns, number, f"{where}.patterns")
            for number in self._column(value.get("patterns"), f"{where}.patterns").tolist()
        ]
        sources = self._sources_of(value.get("sources"), patterns, f"{where}.sources")
        if not len(names) == len(patterns) == len(sources):
            raise NotationError(f"{where}: {len(names)} names and {len(patterns)} patterns")
        parameters = {
            name: ParameterLayout(name, pattern, own)
            for name, pattern, own in zip(names, patterns, sources, strict=True)
        }
        tied = self.reader.field("tied", list, [], of=value)
        return RankLayout(
            read_int(value.get("rank"), f"{where}.rank", 0),
            parameters,
            tuple(self._names_of(value.get("unread"), f"{where}.unread")),
            tuple(tuple(read_strings(group, f"{where}.tied")) for group in tied),
            self.reader.field("method", str, METHODS[0], of=value),
            self._notes(value),
        )

    def _sources_of(
        self, number: object, patterns: Sequence[ParameterPattern], where: str
    ) -> list[tuple[str, ...]]:
        """Return the names of each parameter's sources, which are in a single column."""
        counts = np.array([pattern.sources for pattern in patterns], dtype=np.int64)
        key = (read_int(number, where, 0), counts.tobytes())
        if key not in self.known:
            names = self._names_of(number, where)
            if len(names) != counts.sum():
                raise NotationError(f"{where}: {len(names)} names for {counts.sum()} sources")
            ends = np.cumsum(counts)
            self.known[key] = [
                tuple(names[a:b])
                for a, b in zip((ends - counts).tolist(), ends.tolist(), strict=True)
            ]
        return self.known[key]

    def _read_pattern(self, value: Any, where: str) -> ParameterPattern:
        read_json(value, dict, where)
        field = self.reader.field
        shape = read_ints(field("shape", list, of=value), f"{where}.shape", 0)
        dims = len(shape)
        steps = [
            tuple(read_strings(names, f"{where}.steps"))
            for names in field("steps", list, [[]], of=value)
        ]
        columns = PieceColumns.empty(dims)
        if "pieces" in value:
            numbers = field("pieces", list, of=value)
            own = [self._column(number, f"{where}.pieces") for number in numbers]
            if len(own) != 3 * dims + 3 or len({len(column) for column in own}) != 1:
                raise NotationError(
                    f"{where}: columns of {[len(column) for column in own]} pieces for {dims} "
                    "dimensions"
                )
            tables = [
                np.array(own[dims * i : dims * (i + 1)], np.int64).reshape(dims, len(own[-1])).T
                for i in range(3)
            ]
            # Offsets are stored relative to the first, so that ranks and layers share their
            # columns.
            first = read_int(value.get("first"), f"{where}.first", 0)
            columns = PieceColumns(
                tables[0], tables[1], own[-3], own[-2] + first, tables[2], own[-1]
            )
        computed = field("computed", list, [], of=value)
        constants = field("constants", list, [], of=value)
        unfilled = field("unfilled", list, [], of=value)
        return ParameterPattern(
            shape,
            read_dtype(value.get("dtype"), f"{where}.dtype"),
            columns,
            steps,
            [_read_computed(region, dims, f"{where}.computed") for region in computed],
            [_read_constant(region, dims, f"{where}.constants") for region in constants],
            [_read_box(box, dims, f"{where}.unfilled") for box in unfilled],
        )


def _read_kind(value: Any, where: str) -> SourceTensor:
    if not isinstance(value, list) or len(value) != 2:
        raise NotationError(f"{where}: {value!r} is not a dtype and a shape")
    return SourceTensor(read_dtype(value[0], where), read_ints(value[1], where, 0))


def _read_box(value: Any, dims: int, where: str) -> Box:
    if not isinstance(value, list) or len(value) != 2:
        raise NotationError(f"{where}: {value!r} is not two corners of a box")
    start, stop = (read_ints(corner, where, 0) for corner in value)
    if len(start) != dims or len(stop) != dims:
        raise NotationError(f"{where}: the box {value!r} of a parameter of {dims} dimensions")
    return Box(start, stop)


def _read_computed(value: Any, dims: int, where: str) -> Computed:
    if not isinstance(value, list) or len(value) not in (3, 5):
        raise NotationError(f"{where}: {value!r} is not a box, operations, sources and a region")
    view = None
    if len(value) == 5:
        strides = read_ints(value[4], where)
        if len(strides) != dims:
            raise NotationError(f"{where}: {len(strides)} strides of {dims} dimensions")
        view = View(read_int(value[3], where, 0), strides)
    sources = read_ints(value[2], where, 0)
    operations = tuple(read_strings(value[1], where))
    if view is not None and len(sources) != 1:
        raise NotationError(f"{where}: a region of {len(sources)} sources")
    return Computed(_read_box(value[0], dims, where), operations, sources, view)


def _read_constant(value: Any, dims: int, where: str) -> Constant:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
        raise NotationError(f"{where}: {value!r} is not a box and the text of a value")
    try:
        number = float(value[1])
    except ValueError:
        raise NotationError(f"{where}: {value[1]!r} is not the text of a value") from None
    return Constant(_read_box(value[0], dims, where), number)


def read_layout_file(path: str | os.PathLike[str]) -> EngineLayout:
    """Return the engine's layout in a file.

    Raises RecipeError for a file that is missing or has other content.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"cannot read the layout file {os.fspath(path)}: {error.strerror or error}; "
            "`reshard recipe derive` writes it"
        ) from error
    except ValueError:
        text = ""
    try:
        layout = from_json(text)
    except ReshardError as error:
        raise RecipeError(f"the layout file {os.fspath(path)}: {error}") from error
    if not isinstance(layout, EngineLayout):
        raise RecipeError(
            f"{os.fspath(path)} has a {type(layout).__name__}, not an engine's layout; `reshard "
            "recipe derive` writes layouts"
        )
    return layout
