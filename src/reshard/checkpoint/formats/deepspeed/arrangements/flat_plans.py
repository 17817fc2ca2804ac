"""The flat buffers of a new checkpoint: which parameter lies where in which rank's partition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.checkpoint.formats.deepspeed.arrangements.training_parts import TrainingParts
from reshard.checkpoint.formats.deepspeed.parallel.experts import ExpertRanks, GroupCopy, deal
from reshard.checkpoint.formats.deepspeed.partitions import (
    FlatPiece,
    deal_round_robin,
    flat_pieces,
    own_pieces,
    parameter_paddings,
    part_size,
    partition_size,
    sub_groups,
)
from reshard.checkpoint.formats.deepspeed.stored_tensors import lay_out
from reshard.checkpoint.formats.torch_files.optimizer_states import (
    MASTER,
    STEP,
    split_state_name,
    state_name,
)
from reshard.errors import UsageError
from reshard.layout import Layout

Shape = tuple[int, ...]
_DEFAULT_SUB_GROUP = 10**9


@dataclass(frozen=True)
class FlatPlan:
    """The flat buffers of all ranks.

    Attributes:
        ranks: how many there are.
        copies: of each buffer, the ranks that have the same parameters, and these in order. All
            ranks have, but for experts'; a buffer of stage 3 is a sub-group's.
        owners: the group of hyper-parameters that each buffer belongs to.
        sizes: elements of each buffer, padding included.
        pieces: of each parameter.
        paddings: behind each parameter of each buffer.
    """

    ranks: int
    copies: tuple[tuple[GroupCopy, ...], ...]
    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: Mapping[str, tuple[FlatPiece, ...]]
    paddings: tuple[tuple[int, ...], ...]

    @cached_property
    def by_rank(self) -> tuple[Mapping[str, FlatPiece], ...]:
        """The piece of each parameter that each rank has."""
        found: list[dict[str, FlatPiece]] = [{} for _ in range(self.ranks)]
        for name, pieces in self.pieces.items():
            for piece in pieces:
                found[piece.rank][name] = piece
        return tuple(found)

    def copy(self, buffer: int, rank: int) -> GroupCopy:
        """What of a buffer a rank has, with the other ranks that have the same."""
        return next(copy for copy in self.copies[buffer] if rank in copy.ranks)

    def names(self, buffer: int, rank: int) -> tuple[str, ...]:
        """The parameters of a rank's buffer, in its order."""
        return self.copy(buffer, rank).names

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks that have a part of each parameter's buffer."""
        every = [copy for copies in self.copies for copy in copies]
        return {name: copy.ranks for copy in every for name in copy.names}

    def used(self, buffer: int, rank: int, shapes: Mapping[str, Shape]) -> int:
        """Elements of a rank's buffer before the padding at its end, stages 1 and 2."""
        copy = self.copy(buffer, rank)
        own = sum(math.prod(shapes[name]) for name in copy.names)
        total = own + sum(self.paddings[buffer])
        before = copy.ranks.index(rank) * self.sizes[buffer]
        return min(max(total - before, 0), self.sizes[buffer])


def plan_flat(
    parts: TrainingParts, shared: ExpertRanks, zero: Mapping[str, Any], itemsize_bytes: int
) -> FlatPlan:
    """The partitions of stages 1 and 2; `zero` is the configuration of it.

    Raises:
        UsageError: experts that the ranks cannot share out evenly.
    """
    copies, sizes, paddings = [], [], []
    pieces: dict[str, tuple[FlatPiece, ...]] = {}
    everyone = tuple(range(shared.ranks))
    for group in parts.groups:
        if group.is_of_experts:
            dealt = deal(group.names, shared)
        else:
            dealt = (GroupCopy(everyone, group.names),)
        size, padding, found = 0, [], []
        for copy in dealt:
            own, ranks = [*copy.names], copy.ranks
            if zero.get("round_robin_gradients"):
                own = [own[number] for number in deal_round_robin(len(own), len(ranks))]
            elements = [math.prod(parts.shapes[name]) for name in own]
            padding = [0] * len(own)
            if zero.get("parameter_alignment"):
                padding = parameter_paddings(elements, itemsize_bytes)
            size = partition_size(sum(elements) + sum(padding), len(ranks))
            for name, flat in zip(own, flat_pieces(elements, padding, size), strict=True):
                pieces[name] = tuple(one._replace(rank=ranks[one.rank]) for one in flat)
            found.append(GroupCopy(ranks, tuple(own)))
        copies.append(tuple(found))
        sizes.append(size)
        paddings.append(tuple(padding))
    owners = tuple(range(len(parts.groups)))
    return FlatPlan(shared.ranks, tuple(copies), owners, tuple(sizes), pieces, tuple(paddings))


def plan_own(parts: TrainingParts, ranks: int, zero: Mapping[str, Any]) -> FlatPlan:
    """The partitions of stage 3: sub-groups of at most `sub_group_size` elements a rank."""
    most = zero.get("sub_group_size", _DEFAULT_SUB_GROUP)
    if not isinstance(most, int | float) or most <= 0:
        most = _DEFAULT_SUB_GROUP
    everyone = tuple(range(ranks))
    copies: list[tuple[GroupCopy, ...]] = []
    owners, sizes = [], []
    pieces: dict[str, tuple[FlatPiece, ...]] = {}
    for number, group in enumerate(parts.groups):
        elements = [math.prod(parts.shapes[name]) for name in group.names]
        for members in sub_groups([part_size(one, ranks) for one in elements], int(most)):
            offset = 0
            for member in members:
                pieces[group.names[member]] = own_pieces(elements[member], ranks, offset)
                offset += part_size(elements[member], ranks)
            copies.append((GroupCopy(everyone, tuple(group.names[one] for one in members)),))
            owners.append(number)
            sizes.append(offset)
    paddings = tuple((0,) * len(copy.names) for (copy,) in copies)
    return FlatPlan(ranks, tuple(copies), tuple(owners), tuple(sizes), pieces, paddings)


def place_parts(
    parts: TrainingParts, plan: FlatPlan, shapes: Mapping[str, Shape], *, is_stage3: bool
) -> dict[str, Layout]:
    """The layout of every tensor: flat pieces, or whole on the ranks whose files have it.

    Raises:
        UsageError: state that is neither a number nor of its parameter's shape.
    """
    # Every rank has a file of weights under stage 3, and rank 0 alone elsewhere.
    holders = range(plan.ranks) if is_stage3 else range(1)
    found: dict[str, Layout] = {}
    for name, shape in shapes.items():
        if (split := split_state_name(name)) is not None:
            found[name] = _place_state(*split, shape, parts, plan)
        elif name in parts.frozen and is_stage3:
            found[name] = _lay_out_pieces(shape, own_pieces(math.prod(shape), plan.ranks, 0), plan)
        elif name in parts.shapes or name in parts.shared:
            found[name] = Layout.whole(shape, [0], plan.ranks)
        else:
            found[name] = Layout.whole(shape, holders, plan.ranks)
    return found


def _place_state(
    parameter: str, key: str, shape: Shape, parts: TrainingParts, plan: FlatPlan
) -> Layout:
    if is_flat(key, shape, parts.shapes[parameter]):
        return _lay_out_pieces(shape, plan.pieces[parameter], plan)
    if math.prod(shape) != 1:
        raise UsageError(
            f"{state_name(parameter, key)!r} has shape {list(shape)}, and "
            f"{state_name(parameter, MASTER)} {list(parts.shapes[parameter])}: ZeRO cuts state of "
            "its parameter's shape, and keeps numbers; --exclude it, or choose the format torch-dcp"
        )
    return Layout.whole(shape, plan.holders[parameter], plan.ranks)


def is_flat(key: str, shape: Shape, parameter: Shape) -> bool:
    """Whether state of a key lies in flat buffers as its parameter does."""
    return key != STEP and shape == parameter


def _lay_out_pieces(shape: Shape, pieces: tuple[FlatPiece, ...], plan: FlatPlan) -> Layout:
    ranges = tuple((piece.rank, piece.start, piece.stop) for piece in pieces)
    return lay_out(shape, ranges, plan.ranks)[0]
