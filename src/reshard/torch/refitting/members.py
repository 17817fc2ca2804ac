"""Members of fused tensors, and the ranges of a tensor's dimension in which they are stored.

1. A model's tensors are found by name: their own names, or the names of the members of a fused
   tensor (`reshard.recipes.naming`).
2. A member is stored in ranges on either side. Split at the ends of both, they correspond::

       source  linear_qkv       | q q k v | q q k v |       member q    2:4 of it | 2:4
       target  q_proj           | q q q q |                             0:4

       q[0:2]   source 0:2 of linear_qkv     target 0:2 of q_proj
       q[2:4]   source 4:6 of linear_qkv     target 2:4 of q_proj

3. A range of a tensor is itself a tensor: its layout is the tensor's, restricted to those indices,
   and on each rank it is a view of the rank's part, so it is sent from where it is stored::

       8 rows over 2 ranks         rows 3:6 of it         in the memory of
       rank 0   0 1 2 3            rank 0   0             rank 0   . . . x
       rank 1   4 5 6 7            rank 1   1 2           rank 1   x x . .
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.megatron.names import resolve_tie
from reshard.recipes.naming import MemberSlice
from reshard.runs import PAD, IntArray, RunTable
from reshard.torch.models.model_manifest import ModelTensor


@dataclass(frozen=True, slots=True)
class Member:
    """A named tensor of a model: the tensor `name` itself, or a part of that fused tensor.

    `places` are its ranges of `dimension`, in the member's order; empty if it is a whole tensor.
    """

    name: str
    tensor: ModelTensor
    dimension: int | None = None
    places: tuple[MemberSlice, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the member."""
        shape = list(self.tensor.layout.shape)
        if self.dimension is not None:
            shape[self.dimension] = sum(place.stop - place.start for place in self.places)
        return tuple(shape)

    @property
    def edges(self) -> set[int]:
        """The starts of its ranges, in the member's own indices."""
        return {place.member_start for place in self.places}

    def range_of(self, dimension: int, start: int, stop: int) -> IndexRange | None:
        """Return indices of the member in a single range, or None for a whole tensor."""
        if self.dimension is None:
            if (start, stop) == (0, self.shape[dimension]):
                return None
            return IndexRange(self.tensor.layout, dimension, start, stop)
        # The range that contains `start`: pieces do not extend beyond its end.
        place = max(place for place in self.places if place.member_start <= start)
        ahead = place.start - place.member_start
        return IndexRange(self.tensor.layout, dimension, ahead + start, ahead + stop)


def members_of(side: Mapping[str, ModelTensor]) -> dict[str, Member]:
    """Return a model's tensors and members by name.

    Raises RecipeError for a fused tensor whose length cannot be divided among its members.
    """
    members = {name: Member(name, tensor) for name, tensor in side.items()}
    for name, tensor in side.items():
        for member_name, member in fused_members(name, tensor).items():
            # A tensor of that name takes precedence over a member of another tensor.
            members.setdefault(member_name, member)
    return members


def repeated_members(side: Mapping[str, ModelTensor], ties: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of members of two fused tensors that are not tied.

    This includes tables whose members have no `*`, which apply to all layers.
    """
    first_owner: dict[str, str] = {}
    for name, tensor in side.items():
        for member in tensor.fusion.members if tensor.fusion is not None else ():
            other = first_owner.setdefault(member, name)
            if resolve_tie(other, ties) != resolve_tie(name, ties):
                yield (
                    f"{member}: a member of {other} and of {name}; give each members of its own, "
                    "such as by a `*` in their names"
                )


def repeated_tensors(side: Mapping[str, ModelTensor], ties: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of tensors that are also members of a fused tensor."""
    for name, tensor in side.items():
        for member in tensor.fusion.members if tensor.fusion is not None else ():
            if member in side and member != name and resolve_tie(member, ties) != name:
                yield f"{member}: a tensor, and a member of {name}; leave one of them out"


def fused_members(name: str, tensor: ModelTensor) -> dict[str, Member]:
    """Return the members of a fused tensor, empty for other tensors.

    Raises:
        RecipeError: a length that its members cannot share.
        ShardError: a tensor without the dimension that they share.
    """
    fusion = tensor.fusion
    if fusion is None:
        return {}
    shape, dimension = tensor.layout.shape, fusion.dimension
    if fusion.stacked or fusion.transposed:
        raise ShardError(
            f"{name}: a stack or transposed members, {list(fusion.members)}, which live models "
            "cannot be matched by; write a checkpoint in the other names, or give `stacks`"
        )
    if dimension >= len(shape):
        raise ShardError(f"{name}: shape {list(shape)}, but its dimension {dimension} is fused")
    places: dict[str, list[MemberSlice]] = {member: [] for member in fusion.members}
    for place in fusion.member_slices(shape[dimension]):
        places[place.member].append(place)
    return {
        member: Member(name, tensor, dimension, tuple(ranges)) for member, ranges in places.items()
    }


class CommonRange(NamedTuple):
    """Indices `start:stop` of a member on both sides; a range of None is the whole tensor."""

    start: int
    stop: int
    source: IndexRange | None
    target: IndexRange | None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole tensor on both sides."""
        return self.source is None and self.target is None


def common_ranges(source: Member, target: Member) -> Iterator[CommonRange]:
    """Yield the ranges that two members of equal shape have in common, in order.

    If neither is fused, there is a single, whole range. Raises ShardError for members that are
    fused along different dimensions.
    """
    dimensions = {member.dimension for member in (source, target)} - {None}
    if not dimensions:
        yield CommonRange(0, 0, None, None)
        return
    if len(dimensions) != 1:
        raise ShardError(
            f"fused along dimensions {source.dimension} and {target.dimension}; both sides must "
            "be along one"
        )
    (dimension,) = dimensions
    length = source.shape[dimension or 0]
    # Split where a range of either side begins: a piece lies in one range of each side.
    edges = sorted({*source.edges, *target.edges, 0})
    for start, stop in zip(edges, [*edges[1:], length], strict=True):
        ranges = [side.range_of(dimension or 0, start, stop) for side in (source, target)]
        yield CommonRange(start, stop, *ranges)


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Indices `start:stop` of dimension `dimension` of a tensor with the layout `whole`."""

    whole: Layout
    dimension: int
    start: int
    stop: int

    @property
    def layout(self) -> Layout:
        """The layout of the range.

        Raises ShardError if a rank has several boxes of the tensor, or the indices in another
        order.

        >>> whole = Layout.replicated((8, 2), 2)
        >>> IndexRange(whole, 0, 3, 6).layout is Layout.replicated((3, 2), 2)
        True
        """
        return _cut(self.whole, self.dimension, self.start, self.stop)[0]

    def of(self, local: torch.Tensor | None, rank: int) -> torch.Tensor | None:
        """Return the view of a rank's part of the tensor that is its part of the range."""
        if local is None or rank >= self.whole.slots or not self.whole.cells_of(rank):
            return None
        _, begins = _cut(self.whole, self.dimension, self.start, self.stop)
        (cell,) = self.whole.cells_of(rank)
        shape = self.layout.local_shape(rank) or ()
        part = int(self.whole.cell_part[cell, self.dimension])
        return local.narrow(self.dimension, int(begins[part]), shape[self.dimension])


# Cached, since the layers of a model have the same layouts.
@lru_cache(maxsize=4096)
def _cut(whole: Layout, dimension: int, start: int, stop: int) -> tuple[Layout, IntArray]:
    """Return the layout of a range, and its start in each part: shape `(parts,)`."""
    if any(len(whole.cells_of(slot)) > 1 for slot in whole.holders):
        raise ShardError(
            "a part of it is another tensor, but a rank has it in several boxes; give the fused "
            "tensor one box on each rank"
        )
    tables = list(whole.tables)
    tables[dimension], begins = table_between(tables[dimension], start, stop)
    shape = tuple(table.dimension_length for table in tables)
    return whole.replace(shape=shape, tables=tables), begins


def table_between(table: RunTable, start: int, stop: int) -> tuple[RunTable, IntArray]:
    """Return the runs of indices `start:stop`, counted from 0, and their offsets in each part.

    Raises ShardError if a part has other indices between them.

    >>> from reshard.cut_rules import Strided
    >>> found, begins = table_between(Strided(2).table(8, 2), 4, 8)
    >>> print(found, begins)
    part 0: 2 from 0
    part 1: 2 from 2 [2 2]
    """
    runs = table.single_runs()
    low, high = np.maximum(runs.start, start), np.minimum(runs.stop, stop)
    inside = (high > low) & (runs.role != PAD)
    runs, low, high = runs.take(inside), low[inside], high[inside]
    local = runs.local_start + low - runs.start
    begins = np.zeros(table.parts, dtype=np.int64)
    is_first = np.diff(runs.part, prepend=-1) != 0
    # A part's first run gives its offset; the following runs must be contiguous.
    begins[runs.part[is_first]] = local[is_first]
    follows = local[1:] == (local + high - low)[:-1]
    if not (follows | is_first[1:]).all():
        raise ShardError(
            f"indices {start}:{stop} do not lie one after another on a rank; a fused tensor's "
            "members must"
        )
    columns = (runs.part, low - start, high - low, local - begins[runs.part], runs.role)
    return RunTable.from_columns(stop - start, table.parts, *columns), begins
