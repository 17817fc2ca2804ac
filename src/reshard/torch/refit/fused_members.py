"""Which stretches do two models have in common, where one fuses what the other keeps apart?

1. Each tensor of a model is found by what it is: by its own name, or by the names of its members
   where it is fused (`reshard.recipes.fusion`);
2. a member has stretches on either side; cut at the ends of both, they are the same pieces::

       source  linear_qkv       | q q k v | q q k v |       member q    2:4 of it | 2:4
       target  q_proj           | q q q q |                             0:4

       q[0:2]   source 0:2 of linear_qkv     target 0:2 of q_proj
       q[2:4]   source 4:6 of linear_qkv     target 2:4 of q_proj

3. each piece moves by itself, between views of both tensors: nothing is put together on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import ShardError
from reshard.torch.models.naming import tied_root
from reshard.torch.models.rosters import Held
from reshard.torch.refit.spans import Span


class Place(NamedTuple):
    """Indices of a member, from `member_start`, as `start:stop` of a tensor's fused dimension."""

    member_start: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor as a model has it: the tensor `name`, or a part of the fused one of that name.

    `places` are its stretches of `dimension`, in the member's order; none where it is the tensor.
    """

    name: str
    held: Held
    dimension: int | None = None
    places: tuple[Place, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the member."""
        shape = list(self.held.layout.shape)
        if self.dimension is not None:
            shape[self.dimension] = sum(place.stop - place.start for place in self.places)
        return tuple(shape)

    @property
    def edges(self) -> set[int]:
        """Where its stretches begin, in its own indices."""
        return {place.member_start for place in self.places}

    def span(self, dimension: int, start: int, stop: int) -> Span | None:
        """Indices of the member that lie in one stretch; None where they are a whole tensor."""
        if self.dimension is None:
            if (start, stop) == (0, self.shape[dimension]):
                return None
            return Span(self.held.layout, dimension, start, stop)
        place = max(place for place in self.places if place.member_start <= start)
        ahead = place.start - place.member_start
        return Span(self.held.layout, dimension, ahead + start, ahead + stop)


def members_of(side: Mapping[str, Held]) -> dict[str, Member]:
    """What a model has, by the names of tensors and of members.

    Raises RecipeError for a fused tensor whose length its members do not share.
    """
    found = {name: Member(name, held) for name, held in side.items()}
    for name, held in side.items():
        for member in fused_members(name, held):
            found.setdefault(member, fused_members(name, held)[member])
    return found


def doubled_members(side: Mapping[str, Held], ties: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with members that two fused tensors have, which are not tied.

    A table whose members have no `*` says so of the tensors of all layers.
    """
    has: dict[str, str] = {}
    for name, held in side.items():
        for member in held.fusion.members if held.fusion is not None else ():
            other = has.setdefault(member, name)
            if tied_root(other, ties) != tied_root(name, ties):
                yield (
                    f"{member}: a member of {other} and of {name}; give each members of its own, "
                    "such as by a `*` in their names"
                )


def told_twice(side: Mapping[str, Held], ties: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with tensors whose elements a fused one has too: which of both counts?"""
    for name, held in side.items():
        for member in held.fusion.members if held.fusion is not None else ():
            if member in side and member != name and tied_root(member, ties) != name:
                yield f"{member}: a tensor, and a member of {name}; leave one of them out"


def fused_members(name: str, held: Held) -> dict[str, Member]:
    """The members of a fused tensor, none of another.

    Raises:
        RecipeError: a length that its members cannot share.
        ShardError: a tensor without the dimension that they share.
    """
    fusion = held.fusion
    if fusion is None:
        return {}
    shape, dimension = held.layout.shape, fusion.dimension
    if dimension >= len(shape):
        raise ShardError(f"{name}: shape {list(shape)}, but its dimension {dimension} is fused")
    places: dict[str, list[Place]] = {member: [] for member in fusion.members}
    for stretch in fusion.stretches(shape[dimension]):
        places[stretch.member].append(Place(stretch.member_start, stretch.start, stretch.stop))
    return {member: Member(name, held, dimension, tuple(of)) for member, of in places.items()}


class Piece(NamedTuple):
    """Indices `start:stop` of a member on both sides; no span is the whole tensor."""

    start: int
    stop: int
    source: Span | None
    target: Span | None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole tensor on both sides."""
        return self.source is None and self.target is None


def pieces_of(source: Member, target: Member) -> Iterator[Piece]:
    """The pieces that two members of one shape have in common, in order.

    Where neither is fused there is one, whole. Raises ShardError for members that are fused along
    different dimensions.
    """
    dimensions = {one.dimension for one in (source, target)} - {None}
    if not dimensions:
        yield Piece(0, 0, None, None)
        return
    if len(dimensions) != 1:
        raise ShardError(
            f"fused along dimensions {source.dimension} and {target.dimension}; both sides must "
            "be along one"
        )
    (dimension,) = dimensions
    length = source.shape[dimension or 0]
    edges = sorted({*source.edges, *target.edges, 0})
    for start, stop in zip(edges, [*edges[1:], length], strict=True):
        spans = [side.span(dimension or 0, start, stop) for side in (source, target)]
        yield Piece(start, stop, *spans)
