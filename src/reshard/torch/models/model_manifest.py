"""Manifests: the tensors of every rank of a model, assembled to those of the full model.

A rank lists its tensors: names, dtypes, local shapes, and how each tensor is sharded as far as it
knows. The lists of all ranks together determine each tensor of the model:

1. a tensor with a known layout (a DTensor, or a tensor given with a layout) has that layout, and
   every rank must describe the same; or ranks of several layouts each have a replica, as on the
   parts `mesh["dp"]` of a mesh, which differ between the ranks of `tp`;
2. a parameter of Megatron has attributes known to its rank, which are combined over all ranks
   (`reshard.megatron.parameters`);
3. any other tensor is replicated on every rank that lists it.

Mismatches are collected instead of raised, so that users see all of them at once.

Tensors of many layers differ only in their names. A rank's entries are therefore columns: names,
and for each name the number of its kind, which holds everything else::

    names     layers.0.up    layers.0.down    layers.1.up    layers.1.down
    kind_of   0              1                0              1
    kinds     0: bfloat16 [4, 8], sharded by rows    1: bfloat16 [8, 4], sharded by columns

Manifests are sent as JSON documents, for ranks of other jobs and versions. The message of a rank of
another job is validated like any input: nothing is unpickled. A document contains each kind of
tensor once, and refers to it by number::

    {"reshard": "names", "version": 1, ...,
     "names":       ["layers.0.up", "layers.1.up", ...],     common names
     "own_names":   [...], "local_names": [...]}             empty if equal, or if absent

    {"reshard": "roster", "version": 1, "tables": ..., "layouts": ...,
     "first_rank": 0, "problems": [], "unmatched": [], "megatron": [names of its ranks],
     "kinds":   [{"dtype", "shape", "layout", ...}],
     "kind_of": [column of kinds],
     "samples": [...]}                                       empty without samples

Names are a separate document, since ranks with different parts of the same tensors have the same
names, which are then sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import NotationError, ReshardError
from reshard.layout import Layout
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.parameters import LocalParameter, MegatronParameter, gather_parameters
from reshard.megatron.ranks import MegatronGrids, MegatronRanks
from reshard.plans import documents
from reshard.recipes.naming import Fusion
from reshard.runs import IntArray, RunTable, find_distinct
from reshard.sharding import ShardingSpec
from reshard.sharding import spec as parse_spec
from reshard.text import first_text

Shape = tuple[int, ...]


class Entry(NamedTuple):
    """A tensor of a rank, or without names, what several tensors have in common: their kind.

    Attributes:
        name: common to both models.
        dtype: the element type, or None if the rank lacks a part and does not know it.
        shape: the local shape, or None without a part on this rank.
        layout: over global ranks, if the rank knows it.
        parameter: Megatron's attributes, under its `local_name` in the model chunk `chunk`.
        fusion: how its members are stored in it, if it is fused; by common names.
        own_name: the model's own name of it; of Megatron's over the full model.
        spec: the sharding of the layout, if the rank knows it.
        alias_of: the name of a tied tensor whose memory it is on this rank.
        sample: a digest of elements of a plain tensor, if ranks are to compare them.
    """

    name: str
    dtype: str | None
    shape: Shape | None
    layout: Layout | None = None
    parameter: LocalParameter | None = None
    local_name: str = ""
    chunk: int = 0
    fusion: Fusion | None = None
    own_name: str = ""
    spec: ShardingSpec | None = None
    alias_of: str = ""
    sample: str = ""

    @property
    def kind(self) -> Entry:
        """The entry without its names and sample, which other tensors may share."""
        return self._replace(name="", local_name="", own_name="", sample="")


@dataclass(frozen=True, slots=True)
class NameColumns:
    """Names of a rank's tensors, in their order.

    Attributes:
        names: common to both models.
        own_names: the model's names; the same list if they are equal.
        local_names: the names on Megatron's ranks; empty for other models.
    """

    names: Sequence[str] = ()
    own_names: Sequence[str] = ()
    local_names: Sequence[str] = ()

    @property
    def are_own(self) -> bool:
        """Whether all own names are the common names."""
        return self.own_names is self.names or self.own_names == self.names


class EntryColumns(Sequence[Entry]):
    """A rank's entries. `samples` is empty if there are none.

    >>> columns = EntryColumns.of([Entry("up", "int8", (4, 2)), Entry("down", "int8", (4, 2))])
    >>> columns.kind_of, len(columns.kinds), columns[1].name
    ([0, 0], 1, 'down')
    """

    __slots__ = ("kind_of", "kinds", "name_columns", "samples")

    def __init__(
        self,
        name_columns: NameColumns,
        kinds: Sequence[Entry],
        kind_of: Sequence[int],
        samples: Sequence[str] = (),
    ) -> None:
        self.name_columns = name_columns
        self.kinds = kinds
        self.kind_of = kind_of
        self.samples = samples

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> EntryColumns:
        """Return entries as columns."""
        if isinstance(entries, EntryColumns):
            return entries
        kinds: dict[Entry, int] = {}
        listed = tuple(entries)
        return cls(
            NameColumns(
                [entry.name for entry in listed],
                [entry.own_name for entry in listed],
                [e.local_name for e in listed] if any(e.local_name for e in listed) else (),
            ),
            # Evaluated before `kinds`, which it fills.
            kind_of=[kinds.setdefault(entry.kind, len(kinds)) for entry in listed],
            kinds=tuple(kinds),
            samples=[e.sample for e in listed] if any(e.sample for e in listed) else (),
        )

    @property
    def names(self) -> Sequence[str]:
        """The common names."""
        return self.name_columns.names

    def with_aliases(self, alias_of: Mapping[str, str]) -> EntryColumns:
        """Return the entries with the given tensors marked as the memory of others."""
        if not alias_of:
            return self
        kinds = {kind: number for number, kind in enumerate(self.kinds)}
        kind_of = list(self.kind_of)
        for number, name in enumerate(self.names):
            if name in alias_of:
                kind = self.kinds[kind_of[number]]._replace(alias_of=alias_of[name])
                kind_of[number] = kinds.setdefault(kind, len(kinds))
        return EntryColumns(self.name_columns, tuple(kinds), kind_of, self.samples)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Entry:  # type: ignore[override]
        names = self.name_columns
        return self.kinds[self.kind_of[number]]._replace(
            name=names.names[number],
            own_name=names.own_names[number],
            local_name=names.local_names[number] if names.local_names else "",
            sample=self.samples[number] if self.samples else "",
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class ListedEntries:
    """The entries of all ranks by number, which is that of their names in order of appearance.

    `kind_of[i]` is equal for tensors that have equal kinds on every rank.
    """

    def __init__(self, ranks: Mapping[int, EntryColumns]) -> None:
        numbers: dict[str, int] = {}
        # Ranks with equal messages share an object; names are often equal even if kinds differ.
        own_numbers: dict[int, list[int]] = {}
        self._ranks = ranks
        for columns in ranks.values():
            if id(columns.name_columns) not in own_numbers:
                own = [numbers.setdefault(name, len(numbers)) for name in columns.names]
                own_numbers[id(columns.name_columns)] = own
        self.names = list(numbers)
        self._own_numbers = own_numbers
        self._places = {
            key: _invert(np.array(listed_numbers, dtype=np.int64), len(numbers))
            for key, listed_numbers in own_numbers.items()
        }
        self.kind_of = self._number_kinds().tolist()
        listed = {
            id(columns.name_columns): columns.name_columns
            for columns in ranks.values()
            if len(columns)
        }
        self.may_share_names = len(listed) > 1 and not all(n.are_own for n in listed.values())

    def _number_kinds(self) -> IntArray:
        kinds: dict[Entry, int] = {}
        numbers = np.zeros(len(self.names), dtype=np.int64)
        for columns in {id(columns): columns for columns in self._ranks.values()}.values():
            # The last number stands for names that a rank does not list.
            of_kind = [kinds.setdefault(kind, len(kinds)) for kind in columns.kinds]
            place = self._places[id(columns.name_columns)]
            own_kinds = np.array([*of_kind, -1])[
                np.append(columns.kind_of, -1).astype(np.int64)[place]
            ]
            # Renumber after each rank, so that the numbers stay small.
            # Pairs of numbers as single numbers, with -1 for absent names moved to 0.
            _, _, numbers = find_distinct(numbers * (len(kinds) + 1) + own_kinds + 1)
        return numbers

    def entries(self, number: int) -> dict[int, Entry]:
        """Return a tensor's entries by rank; the first if a rank lists it twice."""
        entries = {}
        for rank, columns in self._ranks.items():
            place = self._places[id(columns.name_columns)][number]
            if place >= 0:
                entries[rank] = columns[place]
        return entries

    @property
    def repeated(self) -> Iterator[tuple[int, Entry, Entry]]:
        """Yield the rank, first and later entry of names that a rank lists twice."""
        for rank, columns in self._ranks.items():
            own = self._own_numbers[id(columns.name_columns)]
            if len(set(own)) == len(own):
                continue
            places = self._places[id(columns.name_columns)]
            for place, number in enumerate(own):
                if places[number] != place:
                    yield rank, columns[int(places[number])], columns[place]

    @property
    def have_samples(self) -> bool:
        """Whether any rank has samples."""
        return any(columns.samples for columns in self._ranks.values())


def _invert(numbers: IntArray, count: int) -> IntArray:
    """Return the first position of each number, or -1."""
    places = np.full(count, -1, dtype=np.int64)
    # Of equal numbers, the position that is written last remains: the first.
    places[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return places


_SHOWN_RANKS = 4


@dataclass(frozen=True)
class ModelManifest:
    """The tensors of a rank of a model. `names` are those of Megatron's ranks, if it is Megatron's.

    `first_rank` is the global rank of that model's rank 0. `problems` are reasons why the rank
    cannot take part; `unmatched` are given parameters that this rank does not have.
    """

    entries: Sequence[Entry] = ()
    names: MegatronNames | None = None
    first_rank: int = 0
    problems: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> EntryColumns:
        """The entries as columns."""
        return EntryColumns.of(self.entries)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the full model, with Megatron's parameter if it has any.

    `fusion` describes its members if it is fused; `spec` is the sharding of the layout, if ranks
    know it.
    """

    dtype: str
    layout: Layout
    parameter: MegatronParameter | None = None
    first_rank: int = 0
    fusion: Fusion | None = None
    spec: ShardingSpec | None = None


def shift_ranks(layout: Layout, ranks: int) -> Layout:
    """Return the layout with all rank numbers increased by `ranks`.

    >>> shift_ranks(Layout.replicated((4,), 2), 2).holders
    (2, 3)
    """
    if not ranks:
        return layout
    return layout.replace(slots=layout.slots + ranks, cell_slot=layout.cell_slot + ranks)


def merge_layouts(layouts: Sequence[Layout]) -> Layout | None:
    """Return the union of layouts of replicas of a tensor, or None if a rank is in two.

    Parts of all of them overlap, so each has what the others have too.

    >>> rows = Layout.replicated((4,), 1)
    >>> merge_layouts([rows, shift_ranks(rows, 2)]).holders
    (0, 2)
    """
    holders = [rank for layout in layouts for rank in layout.holders]
    if len(set(holders)) != len(holders) or any(layout.contributions > 1 for layout in layouts):
        return None
    if len({layout.shape for layout in layouts}) > 1:
        return None
    tables, parts = [], [layout.cell_part.copy() for layout in layouts]
    for dimension in range(layouts[0].ndim):
        # Each table of the dimension once; parts of later tables are numbered after earlier parts.
        tables_of = list(dict.fromkeys(layout.tables[dimension] for layout in layouts))
        begins = dict(
            zip(
                # The last sum is the total, at which no table begins.
                tables_of,
                accumulate((table.parts for table in tables_of), initial=0),
                strict=False,
            )
        )
        for layout, part in zip(layouts, parts, strict=True):
            part[:, dimension] += begins[layout.tables[dimension]]
        tables.append(_join_tables(tables_of))
    return Layout(
        layouts[0].shape,
        tables,
        max(layout.slots for layout in layouts),
        np.concatenate([layout.cell_slot for layout in layouts]),
        np.concatenate(parts),
    )


def _join_tables(ways: Sequence[RunTable]) -> RunTable:
    if len(ways) == 1:
        return ways[0]
    rows, parts = [], 0
    for way in ways:
        runs = way.single_runs()
        rows.append((runs.part + parts, runs.start, runs.length, runs.local_start, runs.role))
        parts += way.parts
    columns = map(np.concatenate, zip(*rows, strict=True))
    return RunTable.from_columns(ways[0].dimension_length, parts, *columns)


def assemble_tensors(
    manifests: Mapping[int, ModelManifest], side: str
) -> tuple[dict[str, ModelTensor], list[str]]:
    """Return the tensors of a model by name, and the mismatches.

    Args:
        manifests: by global rank.
        side: `source` or `target`, for the messages.
    """
    problems: list[str] = []
    for rank, manifest in manifests.items():
        problems += [f"rank {rank}: {problem}" for problem in manifest.problems]
    listed = ListedEntries({rank: manifest.columns for rank, manifest in manifests.items()})
    for rank, first, entry in listed.repeated:
        # Users' tables of names may give two tensors the same name.
        names = {first.own_name: None, entry.own_name: None}
        text = f", as {' and '.join(map(repr, names))}" if len(names) > 1 else ""
        problems.append(f"{entry.name}: twice in the {side}, on rank {rank}{text}")
    of_megatron = {rank: r for rank, r in manifests.items() if r.names is not None}
    parameters = _gather_parameters(of_megatron, side, problems)
    if of_megatron:
        # Another rank may have what this rank lacks.
        nowhere = set.intersection(*(set(r.unmatched) for r in of_megatron.values()))
        problems += [
            f"{name}: no rank of the {side} has such a parameter, of which MegatronModel says more"
            for name in sorted(nowhere)
        ]
    tensors: dict[str, ModelTensor] = {}
    # Tensors that all ranks describe equally are equal; Megatron's are distinguished by name.
    assembled: dict[int, ModelTensor | None] = {}
    have_samples, may_share = listed.have_samples, listed.may_share_names
    for number, (name, kind) in enumerate(zip(listed.names, listed.kind_of, strict=True)):
        if may_share:
            problems += _find_shared_names(name, listed.entries(number), side)
        if kind in assembled:
            tensor = assembled[kind]
        else:
            by_rank, problems_before = listed.entries(number), len(problems)
            first_of = manifests[next(iter(by_rank))]
            tensor = _assemble_tensor(name, by_rank, parameters, first_of, side, problems)
            # Problems are reported for each tensor.
            if len(problems) == problems_before and (tensor is None or tensor.parameter is None):
                assembled[kind] = tensor
        if tensor is None:
            continue
        if have_samples and tensor.spec is None and tensor.parameter is None:
            problem = _find_different_samples(name, listed.entries(number), side)
            if problem:
                problems.append(problem)
                continue
        tensors[name] = tensor
    return tensors, problems


def _find_shared_names(name: str, by_rank: Mapping[int, Entry], side: str) -> Iterator[str]:
    """Yield a problem if ranks use the same name for tensors with different own names.

    They would pass for copies, or for parts, of the same tensor.
    """
    ranks_by_name: dict[str, int] = {}
    for rank, entry in by_rank.items():
        if entry.shape is not None:
            ranks_by_name.setdefault(entry.own_name, rank)
    if len(ranks_by_name) > 1:
        shown = " and ".join(
            f"{own!r} of rank {rank}" for own, rank in list(ranks_by_name.items())[:2]
        )
        yield (
            f"{name}: the name of two tensors of the {side}, {shown}; give each a name of its "
            "own, and declare ties where they are one"
        )


def _gather_parameters(
    manifests: Mapping[int, ModelManifest], side: str, problems: list[str]
) -> dict[str, MegatronParameter]:
    """Return the combined parameters of Megatron's ranks, by common name."""
    if not manifests:
        return {}
    first = next(iter(manifests.values()))
    # Ranks must agree on the numbering before their parameters can be combined.
    names, ahead = first.names, first.first_rank
    if names is None or any((r.names, r.first_rank) != (names, ahead) for r in manifests.values()):
        problems.append(f"the {side}'s ranks have different MegatronNames or rank offsets")
        return {}
    common: dict[str, str] = {}
    by_rank: dict[int, list[list[tuple[str, LocalParameter]]]] = {}
    try:
        for rank, manifest in manifests.items():
            own = rank - ahead
            chunks = max((entry.chunk for entry in manifest.entries), default=0) + 1
            by_rank[own] = [[] for _ in range(chunks)]
            for entry in manifest.entries:
                if entry.parameter is not None:
                    by_rank[own][entry.chunk].append((entry.local_name, entry.parameter))
                    whole = names.global_name(entry.local_name, own, entry.chunk)
                    common[whole] = entry.name
        gathered = gather_parameters(names, by_rank)
    except ReshardError as error:
        problems.append(f"the {side}'s ranks do not fit: {error}")
        return {}
    return {common[name]: parameter for name, parameter in gathered.items()}


def _assemble_tensor(
    name: str,
    by_rank: Mapping[int, Entry],
    parameters: Mapping[str, MegatronParameter],
    first_of: ModelManifest,
    side: str,
    problems: list[str],
) -> ModelTensor | None:
    fusions = {entry.fusion for entry in by_rank.values()}
    if len(fusions) > 1:
        problems.append(f"{name}: ranks of the {side} name different members of it")
        return None
    (fusion,) = fusions
    if side == "target":
        if all(entry.alias_of or entry.shape is None for entry in by_rank.values()) and any(
            entry.alias_of for entry in by_rank.values()
        ):
            # On every rank it is another tensor's memory, which is filled under that name.
            return None
        by_rank = _without_aliases(by_rank)
    first = next(iter(by_rank.values()))
    # A rank without a part does not know the element type.
    dtypes = {entry.dtype: rank for rank, entry in by_rank.items() if entry.dtype is not None}
    if len(dtypes) != 1:
        text = ", ".join(f"{dtype} on rank {rank}" for dtype, rank in dtypes.items())
        problems.append(f"{name}: the {side} is {text}" if text else f"{name}: no rank has it")
        return None
    (dtype,) = dtypes
    if any((e.parameter is None) != (first.parameter is None) for e in by_rank.values()):
        problems.append(f"{name}: Megatron's on some ranks of the {side}, and not on others")
        return None
    # A Megatron parameter: its layout follows from all ranks' attributes.
    if first.parameter is not None:
        parameter = parameters.get(name)
        if parameter is None:
            return None
        try:
            layout = parameter.spec().layout(parameter.global_shape)
        except ReshardError as error:
            problems.append(f"{name}: the {side}: {error}")
            return None
        # Layouts of Megatron count its own ranks from 0.
        ahead = first_of.first_rank
        whole = replace(parameter, dtype=dtype)
        return ModelTensor(dtype, shift_ranks(layout, ahead), whole, ahead, fusion)
    # A DTensor, or a tensor with a layout: all ranks must describe the same.
    layouts = {entry.layout: rank for rank, entry in by_rank.items()}
    united = None
    if len(layouts) > 1 and None not in layouts:
        united = merge_layouts([layout for layout in layouts if layout is not None])
    if len(layouts) > 1 and united is None:
        ranks = " and ".join(map(str, list(layouts.values())[:2]))
        problems.append(f"{name}: ranks {ranks} have different layouts of the {side}")
        return None
    shared_layout = united or first.layout
    if shared_layout is not None:
        problems += _find_misfits(name, shared_layout, by_rank, side)
        # A union of layouts is not a sharding over a mesh.
        spec = None if united is not None else first.spec
        return ModelTensor(dtype, shared_layout, fusion=fusion, spec=spec)
    # A plain tensor: replicated on each rank that has it.
    shapes = {entry.shape: rank for rank, entry in by_rank.items() if entry.shape is not None}
    if len(shapes) > 1:
        text = ", ".join(f"{list(shape)} on rank {rank}" for shape, rank in shapes.items())
        problems.append(
            f"{name}: a plain tensor of the {side} is whole on every rank, but it has shape {text}"
        )
        return None
    if not shapes:
        problems.append(f"{name}: no rank of the {side} has it")
        return None
    (shape,) = shapes
    holders = [rank for rank, entry in by_rank.items() if entry.shape is not None]
    return ModelTensor(dtype, Layout.whole(shape, holders, max(holders) + 1), fusion=fusion)


def _find_different_samples(name: str, by_rank: Mapping[int, Entry], side: str) -> str:
    """Return a problem if a plain tensor's values differ between ranks, or an empty text."""
    samples: dict[str, int] = {}
    filled = _without_aliases(by_rank) if side == "target" else by_rank
    for rank, entry in filled.items():
        if entry.shape is not None:
            samples.setdefault(entry.sample, rank)
    if len(samples) < 2:
        return ""
    # Sorted, so that every rank reports the same pair.
    first_rank, second_rank, *_ = sorted(samples.values())
    return (
        f"{name}: a plain tensor of the {side} is whole on every rank, but ranks {first_rank} and "
        f"{second_rank} have different values; if they are parts, give it with its Layout, or its "
        "module as MegatronModel; if either will do, say check_replicas=False"
    )


def _without_aliases(by_rank: Mapping[int, Entry]) -> Mapping[int, Entry]:
    """Return the ranks on which a tensor is not filled under another name.

    A tensor with a layout keeps all its ranks: if it is another's memory, both write the same
    values.
    """
    return {
        rank: entry
        for rank, entry in by_rank.items()
        if not entry.alias_of or entry.layout is not None or entry.parameter is not None
    }


def find_alias_names(manifests: Mapping[int, ModelManifest]) -> set[str]:
    """Return the names that are another tensor's memory on some rank."""
    return {entry.name for entry in _list_aliases(manifests)}


def find_tied_names(manifests: Mapping[int, ModelManifest]) -> dict[str, str]:
    """Return names that are another tensor's memory wherever they have elements, with its name.

    >>> embedding, head = Entry("e", "int8", (4, 2)), Entry("h", "int8", (4, 2), alias_of="e")
    >>> empty = Entry("e", "int8", (0, 2)), Entry("h", "int8", (0, 2))
    >>> find_tied_names({0: ModelManifest((embedding, head)), 1: ModelManifest(empty)})
    {'h': 'e'}
    """
    tied: dict[str, str] = {}
    for entry in _list_aliases(manifests):
        tied.setdefault(entry.name, entry.alias_of)
    if tied:
        for manifest in manifests.values():
            for entry in manifest.entries:
                has_elements = entry.shape is not None and 0 not in entry.shape
                if has_elements and entry.alias_of != tied.get(entry.name, entry.alias_of):
                    del tied[entry.name]
    return tied


def _list_aliases(manifests: Mapping[int, ModelManifest]) -> Iterator[Entry]:
    for manifest in manifests.values():
        if any(kind.alias_of for kind in manifest.columns.kinds):
            yield from (entry for entry in manifest.entries if entry.alias_of)


def _find_misfits(name: str, layout: Layout, by_rank: Mapping[int, Entry], side: str) -> list[str]:
    """Return problems of ranks whose local shapes differ from the layout's, grouped by problem."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, expected in layout.local_shapes.items():
        entry = by_rank.get(rank)
        if entry is None or entry.shape is None:
            problem = "no part of the {side}, which its layout says it holds"
            ranks_by_problem.setdefault(problem.format(side=side), []).append(rank)
        elif entry.shape != expected:
            problem = (
                f"local shape {list(entry.shape)}, the {side}'s layout says {list(expected or ())}"
            )
            ranks_by_problem.setdefault(problem, []).append(rank)
    lines = []
    for problem, ranks in ranks_by_problem.items():
        shown = first_text(ranks, _SHOWN_RANKS)
        has = "has" if len(ranks) == 1 else "have"
        lines.append(f"{name}: rank{'s' * (len(ranks) > 1)} {shown} {has} {problem}")
    return lines


_KIND, _NAMES = "roster", "names"


def write_names(manifest: ModelManifest) -> str:
    """Return the document of the names of a rank's tensors."""
    columns = manifest.columns.name_columns
    content = {
        "names": list(columns.names),
        "own_names": [] if columns.are_own else list(columns.own_names),
        "local_names": list(columns.local_names),
    }
    return documents.DocumentWriter().document(_NAMES, content)


def write_manifest(manifest: ModelManifest) -> str:
    """Return the document of a rank's manifest, without the names.

    >>> manifest = ModelManifest((Entry("up", "int8", (4, 2)), Entry("down", "int8", (4, 2))))
    >>> read_manifest(write_manifest(manifest), read_names(write_names(manifest))) == manifest
    True
    """
    writer, columns = documents.DocumentWriter(), manifest.columns
    content = {
        "first_rank": manifest.first_rank,
        "problems": list(manifest.problems),
        "unmatched": list(manifest.unmatched),
        "megatron": [] if manifest.names is None else [_write_names(manifest.names)],
        "kinds": [_write_kind(kind, writer) for kind in columns.kinds],
        # Numbers of several kinds have no order that packing as a grid would shorten.
        "kind_of": list(columns.kind_of)
        if len(columns.kinds) > 1
        else documents.pack_column(columns.kind_of),
        "samples": list(columns.samples),
    }
    return writer.document(_KIND, content)


def _write_kind(kind: Entry, writer: documents.DocumentWriter) -> dict[str, Any]:
    written: dict[str, Any] = {"dtype": kind.dtype, "shape": kind.shape}
    if kind.layout is not None:
        written["layout"] = writer.layout(kind.layout)
    if kind.parameter is not None:
        written["parameter"] = asdict(kind.parameter)
    if kind.chunk:
        written["chunk"] = kind.chunk
    if kind.fusion is not None:
        written["fusion"] = asdict(kind.fusion)
    if kind.spec is not None:
        written["spec"] = [writer.mesh(kind.spec.mesh), str(kind.spec)]
    if kind.alias_of:
        written["alias_of"] = kind.alias_of
    return written


def _write_names(names: MegatronNames) -> dict[str, Any]:
    ranks = names.ranks
    if isinstance(ranks, MegatronRanks):
        written: dict[str, Any] = {"sizes": asdict(ranks)}
    else:
        written = {
            "grids": [documents.DocumentWriter.mesh(mesh) for mesh in (ranks.dense, ranks.expert)]
        }
    layers = None if names.layers is None else [list(chunk) for chunk in names.layers.counts]
    return {**written, "layers": layers, "num_experts": names.num_experts, "stack": names.stack}


def read_names(text: str) -> NameColumns:
    """Return the names in a document.

    Raises:
        ReshardError: text that is not such a document.
    """
    reader = documents.DocumentReader(text, [_NAMES])
    names, own_names, local_names = (
        documents.read_strings(reader.field(column, list), column)
        for column in ("names", "own_names", "local_names")
    )
    for column, column_values in (("own_names", own_names), ("local_names", local_names)):
        _check_length(column_values, names, column)
    return NameColumns(names, own_names or names, local_names)


def read_manifest(text: str, names: NameColumns) -> ModelManifest:
    """Return the manifest in a document, of tensors with these names.

    Raises:
        ReshardError: text that is not such a document, or invalid values.
    """
    reader = documents.DocumentReader(text, [_KIND])
    field = reader.field
    kinds = reader.all_of("kinds", lambda value, where: _read_kind(reader, value, where))
    kind_of = documents.unpack_column(field("kind_of", list), "kind_of")
    if len(kind_of) != len(names.names):
        raise NotationError(f"kind_of: {len(kind_of)} kinds of {len(names.names)} tensors")
    for number in (kind_of.min(), kind_of.max()) if len(kind_of) else ():
        reader.chosen(kinds, int(number), "kind_of")
    samples = documents.read_strings(field("samples", list), "samples")
    _check_length(samples, names.names, "samples")
    megatron = reader.all_of("megatron", lambda value, where: _read_names(reader, value, where))
    return ModelManifest(
        EntryColumns(names, kinds, kind_of.tolist(), samples),
        megatron[0] if megatron else None,
        documents.read_int(field("first_rank", int), "first_rank"),
        tuple(documents.read_strings(field("problems", list), "problems")),
        tuple(documents.read_strings(field("unmatched", list), "unmatched")),
    )


def _check_length(column: Sized, names: Sized, what: str) -> None:
    if column and len(column) != len(names):
        raise NotationError(f"{what}: {len(column)} of {len(names)} tensors")


def write_manifests(before: ModelManifest, after: ModelManifest) -> tuple[bytes, bytes]:
    """Return the names of both models of a rank, and the rest of both manifests."""
    # JSON text contains no line breaks.
    names, others = (
        f"{write(before)}\n{write(after)}".encode() for write in (write_names, write_manifest)
    )
    return names, others


def read_manifests(
    messages: Mapping[int, tuple[bytes, bytes]],
) -> dict[int, tuple[ModelManifest, ModelManifest]]:
    """Return both manifests of every rank; equal messages are parsed once.

    Raises ReshardError for a message that `write_manifests` does not write, naming the rank.

    >>> message = write_manifests(ModelManifest(first_rank=2), ModelManifest())
    >>> read_manifests({0: message, 1: message})[1][0].first_rank
    2
    """
    # Ranks with equal names then share an object, whose identity stands for it (`ListedEntries`).
    names: dict[bytes, list[NameColumns]] = {}
    parsed: dict[tuple[bytes, bytes], tuple[ModelManifest, ModelManifest]] = {}
    for rank, message in messages.items():
        if message in parsed:
            continue
        try:
            both = message[0].decode().split("\n")
            if message[0] not in names:
                names[message[0]] = [read_names(text) for text in both]
            before, after = (
                read_manifest(text, names_of)
                for text, names_of in zip(
                    message[1].decode().split("\n"), names[message[0]], strict=True
                )
            )
            parsed[message] = before, after
        except (ReshardError, ValueError) as error:
            raise NotationError(f"what rank {rank} says of its models: {error}") from error
    return {rank: parsed[message] for rank, message in messages.items()}


def _read_kind(reader: documents.DocumentReader, value: Any, where: str) -> Entry:
    """Return what several tensors have in common."""
    documents.read_json(value, dict, where)
    dtype, shape = value.get("dtype"), value.get("shape")
    fields_read: dict[str, Any] = {
        "dtype": None if dtype is None else documents.read_dtype(dtype, f"{where}.dtype").name,
        "shape": None if shape is None else documents.read_ints(shape, f"{where}.shape", 0),
        "chunk": documents.read_int(value.get("chunk", 0), f"{where}.chunk", 0),
    }
    if "layout" in value:
        fields_read["layout"] = reader.chosen(reader.layouts, value["layout"], f"{where}.layout")
    if "parameter" in value:
        fields_read["parameter"] = _read_parameter(value["parameter"], f"{where}.parameter")
    if "fusion" in value:
        fields_read["fusion"] = _read_fusion(value["fusion"], f"{where}.fusion")
    if "spec" in value:
        fields_read["spec"] = _read_spec(reader, value["spec"], f"{where}.spec")
    if "alias_of" in value:
        (fields_read["alias_of"],) = documents.read_strings(
            [value["alias_of"]], f"{where}.alias_of"
        )
    return Entry("", **fields_read)


def _read_spec(reader: documents.DocumentReader, value: Any, where: str) -> ShardingSpec:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
        raise NotationError(f"{where}: {value!r} is not a mesh and a sharding")
    return parse_spec(reader.mesh(value[0], where), value[1])


def _read_parameter(value: Any, where: str) -> LocalParameter:
    values = _check_fields(value, LocalParameter, where)
    values["shape"] = documents.read_ints(values["shape"], f"{where}.shape", 0)
    for name in ("tensor_model_parallel", "is_expert"):
        if not isinstance(values[name], bool):
            raise NotationError(f"{where}.{name}: {values[name]!r} is not true or false")
    for name in ("partition_dim", "partition_stride", "heads", "true_length"):
        if values[name] is not None or name.startswith("partition"):
            documents.read_int(values[name], f"{where}.{name}")
    if values["partition_sizes"] is not None:
        values["partition_sizes"] = documents.read_ints(
            values["partition_sizes"], f"{where}.sizes", 0
        )
    if values["dtype"] is not None:
        values["dtype"] = documents.read_dtype(values["dtype"], f"{where}.dtype").name
    return LocalParameter(**values)


def _read_fusion(value: Any, where: str) -> Fusion:
    values = _check_fields(value, Fusion, where)
    values["members"] = tuple(documents.read_strings(values["members"], f"{where}.members"))
    documents.read_json(values["when"], str, f"{where}.when")
    return Fusion(**values)


def _read_names(reader: documents.DocumentReader, value: Any, where: str) -> MegatronNames:
    documents.read_json(value, dict, where)
    if "sizes" in value:
        sizes = _check_fields(value["sizes"], MegatronRanks, where)
        documents.read_json(sizes["order"], str, f"{where}.order")
        ranks: MegatronRanks | MegatronGrids = MegatronRanks(**sizes)
    else:
        grids = reader.field("grids", list, of=value)
        if len(grids) != 2:
            raise NotationError(f"{where}: {len(grids)} grids; expected two")
        ranks = MegatronGrids(*(reader.mesh(grid, where) for grid in grids))
    layers, num_experts = value.get("layers"), value.get("num_experts")
    if layers is not None:
        chunks = reader.field("layers", list, of=value)
        layers = PipelineLayers(tuple(documents.read_ints(chunk, where) for chunk in chunks))
    if num_experts is not None:
        documents.read_int(num_experts, f"{where}.num_experts", 1)
    stack = reader.field("stack", str, of=value)
    return MegatronNames(ranks, layers, num_experts, stack)


def _check_fields(value: Any, record_type: type, where: str) -> dict[str, Any]:
    """Return a JSON object that has exactly the fields of a dataclass."""
    expected = {field.name for field in fields(record_type)}
    if not isinstance(value, dict) or set(value) != expected:
        raise NotationError(f"{where}: {value!r} does not say {', '.join(sorted(expected))}")
    return dict(value)
