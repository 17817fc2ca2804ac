"""Rosters: what every rank has of a model, put together to the tensors of the whole.

A rank lists what it has: names, types, local shapes, and how each tensor is cut as far as it
knows. Put together, the lists of all ranks say what each tensor of the model is:

1. a tensor that knows its layout (a DTensor, a tensor given with one) has that, and every rank
   that lists it must say the same; or ranks of several layouts have each a copy of their own, as on
   the parts `mesh["dp"]` of one mesh, which are others on every rank of `tp`;
2. a parameter of Megatron says what one rank can know; the ranks' words together make the whole
   (`reshard.megatron.parameters`);
3. any other tensor is whole on every rank that lists it.

Whatever does not fit is collected, not raised, so that people see all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from reshard.errors import ReshardError
from reshard.layout import Layout
from reshard.megatron.names import MegatronNames
from reshard.megatron.parameters import LocalParameter, MegatronParameter, gather_parameters
from reshard.recipes.naming import Fusion
from reshard.runs import RunTable
from reshard.sharding import ShardingSpec
from reshard.text import first_text
from reshard.torch.models.entries import Entry, EntryColumns, ListedEntries

_SHOWN_RANKS = 4


@dataclass(frozen=True)
class Roster:
    """What one rank has of a model. `names` are those of Megatron's ranks, where it is one.

    `first_rank` is the global rank of that model's rank 0. `problems` are why the rank cannot
    take part; `unmatched` the entries for parameters that are not on this rank.
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
    """A tensor of the whole model. `parameter` is what Megatron's ranks say, if they do.

    `fusion` says how its members lie in it, where it is fused; `spec` is the sharding that the
    layout is of, where ranks know it.
    """

    dtype: str
    layout: Layout
    parameter: MegatronParameter | None = None
    first_rank: int = 0
    fusion: Fusion | None = None
    spec: ShardingSpec | None = None


def shift_ranks(layout: Layout, ranks: int) -> Layout:
    """The same layout on ranks of numbers that are greater by `ranks`.

    >>> shift_ranks(Layout.replicated((4,), 2), 2).holders
    (2, 3)
    """
    if not ranks:
        return layout
    return Layout(
        layout.shape,
        layout.tables,
        layout.slots + ranks,
        layout.cell_slot + ranks,
        layout.cell_part,
        layout.cell_contribution,
        layout.contributions,
        layout.reduction,
    )


def unite_layouts(layouts: Sequence[Layout]) -> Layout | None:
    """The layout of ranks that have several layouts of one tensor; None where a rank is in two.

    Parts of all of them overlap, so each has what the others have too.

    >>> rows = Layout.replicated((4,), 1)
    >>> unite_layouts([rows, shift_ranks(rows, 2)]).holders
    (0, 2)
    """
    holders = [rank for layout in layouts for rank in layout.holders]
    if len(set(holders)) != len(holders) or any(one.contributions > 1 for one in layouts):
        return None
    if len({layout.shape for layout in layouts}) > 1:
        return None
    tables, parts = [], [layout.cell_part.copy() for layout in layouts]
    for dimension in range(layouts[0].ndim):
        # Each way to cut the dimension once; the parts of the next one are counted behind it.
        ways = list(dict.fromkeys(layout.tables[dimension] for layout in layouts))
        begins = dict(zip(ways, accumulate((way.parts for way in ways), initial=0), strict=False))
        for layout, part in zip(layouts, parts, strict=True):
            part[:, dimension] += begins[layout.tables[dimension]]
        tables.append(_join_tables(ways))
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


def assemble(rosters: Mapping[int, Roster], side: str) -> tuple[dict[str, ModelTensor], list[str]]:
    """The tensors of a model by name, and what does not fit.

    Args:
        rosters: by global rank.
        side: `source` or `target`, for the messages.
    """
    problems: list[str] = []
    for rank, roster in rosters.items():
        problems += [f"rank {rank}: {problem}" for problem in roster.problems]
    listed = ListedEntries({rank: roster.columns for rank, roster in rosters.items()})
    for rank, first, entry in listed.repeated:
        # Names become common ones by tables of the user, which may give two tensors one name.
        names = {first.own_name: None, entry.own_name: None}
        text = f", as {' and '.join(map(repr, names))}" if len(names) > 1 else ""
        problems.append(f"{entry.name}: twice in the {side}, on rank {rank}{text}")
    of_megatron = {rank: r for rank, r in rosters.items() if r.names is not None}
    parameters = _gather_parameters(of_megatron, side, problems)
    if of_megatron:
        # Another rank may have what this one lacks.
        nowhere = set.intersection(*(set(r.unmatched) for r in of_megatron.values()))
        problems += [
            f"{name}: no rank of the {side} has such a parameter, of which MegatronModel says more"
            for name in sorted(nowhere)
        ]
    tensors: dict[str, ModelTensor] = {}
    # Tensors of which all ranks say the same are one; Megatron's are told apart by their names.
    known: dict[int, ModelTensor | None] = {}
    have_samples, may_share = listed.have_samples, listed.may_share_names
    for number, (name, kind) in enumerate(zip(listed.names, listed.kind_of, strict=True)):
        if may_share:
            problems += _find_shared_names(name, listed.entries(number), side)
        if kind in known:
            found = known[kind]
        else:
            by_rank, told = listed.entries(number), len(problems)
            first_of = rosters[next(iter(by_rank))]
            found = _assemble_tensor(name, by_rank, parameters, first_of, side, problems)
            # What is wrong is said of each tensor.
            if len(problems) == told and (found is None or found.parameter is None):
                known[kind] = found
        if found is None:
            continue
        if have_samples and found.spec is None and found.parameter is None:
            problem = _find_different_samples(name, listed.entries(number), side)
            if problem:
                problems.append(problem)
                continue
        tensors[name] = found
    return tensors, problems


def _find_shared_names(name: str, by_rank: Mapping[int, Entry], side: str) -> Iterator[str]:
    """What is wrong where ranks give one name to tensors that their model has by two.

    They would pass for copies, or for parts, of one tensor.
    """
    calls: dict[str, int] = {}
    for rank, entry in by_rank.items():
        if entry.shape is not None:
            calls.setdefault(entry.own_name, rank)
    if len(calls) > 1:
        shown = " and ".join(f"{own!r} of rank {rank}" for own, rank in list(calls.items())[:2])
        yield (
            f"{name}: the name of two tensors of the {side}, {shown}; give each a name of its "
            "own, and declare ties where they are one"
        )


def _gather_parameters(
    rosters: Mapping[int, Roster], side: str, problems: list[str]
) -> dict[str, MegatronParameter]:
    """What Megatron's ranks say together, by common name."""
    if not rosters:
        return {}
    first = next(iter(rosters.values()))
    # Ranks must count alike before their parameters can be put together.
    names, ahead = first.names, first.first_rank
    if names is None or any((r.names, r.first_rank) != (names, ahead) for r in rosters.values()):
        problems.append(f"the {side}'s ranks have different MegatronNames or rank offsets")
        return {}
    common: dict[str, str] = {}
    by_rank: dict[int, list[list[tuple[str, LocalParameter]]]] = {}
    try:
        for rank, roster in rosters.items():
            own = rank - ahead
            chunks = max((entry.chunk for entry in roster.entries), default=0) + 1
            by_rank[own] = [[] for _ in range(chunks)]
            for entry in roster.entries:
                if entry.parameter is not None:
                    by_rank[own][entry.chunk].append((entry.local_name, entry.parameter))
                    whole = names.global_name(entry.local_name, own, entry.chunk)
                    common[whole] = entry.name
        found = gather_parameters(names, by_rank)
    except ReshardError as error:
        problems.append(f"the {side}'s ranks do not fit: {error}")
        return {}
    return {common[name]: parameter for name, parameter in found.items()}


def _assemble_tensor(
    name: str,
    by_rank: Mapping[int, Entry],
    parameters: Mapping[str, MegatronParameter],
    first_of: Roster,
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
            # Wherever it is, it is another tensor's memory, which is filled by that one's name.
            return None
        by_rank = _without_aliases(by_rank)
    first = next(iter(by_rank.values()))
    dtypes = {entry.dtype: rank for rank, entry in by_rank.items() if entry.dtype is not None}
    if len(dtypes) != 1:
        text = ", ".join(f"{dtype} on rank {rank}" for dtype, rank in dtypes.items())
        problems.append(f"{name}: the {side} is {text}" if text else f"{name}: no rank has it")
        return None
    (dtype,) = dtypes
    if any((e.parameter is None) != (first.parameter is None) for e in by_rank.values()):
        problems.append(f"{name}: Megatron's on some ranks of the {side}, and not on others")
        return None
    # One of Megatron's: its layout is what all ranks' attributes give together.
    if first.parameter is not None:
        parameter = parameters.get(name)
        if parameter is None:
            return None
        try:
            layout = parameter.spec().layout(parameter.global_shape)
        except ReshardError as error:
            problems.append(f"{name}: the {side}: {error}")
            return None
        ahead = first_of.first_rank
        says = replace(parameter, dtype=dtype)
        return ModelTensor(dtype, shift_ranks(layout, ahead), says, ahead, fusion)
    # A DTensor, or one with a layout: all ranks must describe the same.
    layouts = {entry.layout: rank for rank, entry in by_rank.items()}
    united = None
    if len(layouts) > 1 and None not in layouts:
        united = unite_layouts([layout for layout in layouts if layout is not None])
    if len(layouts) > 1 and united is None:
        ranks = " and ".join(map(str, list(layouts.values())[:2]))
        problems.append(f"{name}: ranks {ranks} have different layouts of the {side}")
        return None
    known = united or first.layout
    if known is not None:
        problems += _find_misfits(name, known, by_rank, side)
        spec = None if united is not None else first.spec
        return ModelTensor(dtype, known, fusion=fusion, spec=spec)
    # A plain tensor: whole on each rank that has it.
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
    """What is wrong with a plain tensor of different values; empty where nothing is."""
    samples: dict[str, int] = {}
    filled = _without_aliases(by_rank) if side == "target" else by_rank
    for rank, entry in filled.items():
        if entry.shape is not None:
            samples.setdefault(entry.sample, rank)
    if len(samples) < 2:
        return ""
    one, other, *_ = sorted(samples.values())
    return (
        f"{name}: a plain tensor of the {side} is whole on every rank, but ranks {one} and "
        f"{other} have different values; if they are parts, give it with its Layout, or its "
        "module as MegatronModel; if either will do, say check_replicas=False"
    )


def _without_aliases(by_rank: Mapping[int, Entry]) -> Mapping[int, Entry]:
    """The ranks where a plain tensor is none that is filled by another name.

    One with a layout keeps all its ranks: where it is another's memory, both write the same.
    """
    return {
        rank: entry
        for rank, entry in by_rank.items()
        if not entry.alias_of or entry.layout is not None or entry.parameter is not None
    }


def alias_names(rosters: Mapping[int, Roster]) -> set[str]:
    """Names of what is another tensor's memory on some rank."""
    return {entry.name for entry in _list_aliases(rosters)}


def one_tensor_names(rosters: Mapping[int, Roster]) -> dict[str, str]:
    """Names of what is another tensor's memory wherever it has elements, and that one's.

    >>> embedding, head = Entry("e", "int8", (4, 2)), Entry("h", "int8", (4, 2), alias_of="e")
    >>> empty = Entry("e", "int8", (0, 2)), Entry("h", "int8", (0, 2))
    >>> one_tensor_names({0: Roster((embedding, head)), 1: Roster(empty)})
    {'h': 'e'}
    """
    found: dict[str, str] = {}
    for entry in _list_aliases(rosters):
        found.setdefault(entry.name, entry.alias_of)
    if found:
        for roster in rosters.values():
            for entry in roster.entries:
                has_elements = entry.shape is not None and 0 not in entry.shape
                if has_elements and entry.alias_of != found.get(entry.name, entry.alias_of):
                    del found[entry.name]
    return found


def _list_aliases(rosters: Mapping[int, Roster]) -> Iterator[Entry]:
    for roster in rosters.values():
        if any(kind.alias_of for kind in roster.columns.kinds):
            yield from (entry for entry in roster.entries if entry.alias_of)


def _find_misfits(name: str, layout: Layout, by_rank: Mapping[int, Entry], side: str) -> list[str]:
    """Ranks whose local shapes are not those of the layout, together where they say the same."""
    found: dict[str, list[int]] = {}
    for rank, expected in layout.local_shapes.items():
        entry = by_rank.get(rank)
        if entry is None or entry.shape is None:
            what = "no part of the {side}, which its layout says it holds"
            found.setdefault(what.format(side=side), []).append(rank)
        elif entry.shape != expected:
            what = (
                f"local shape {list(entry.shape)}, the {side}'s layout says {list(expected or ())}"
            )
            found.setdefault(what, []).append(rank)
    lines = []
    for what, ranks in found.items():
        shown = first_text(ranks, _SHOWN_RANKS)
        has = "has" if len(ranks) == 1 else "have"
        lines.append(f"{name}: rank{'s' * (len(ranks) > 1)} {shown} {has} {what}")
    return lines
