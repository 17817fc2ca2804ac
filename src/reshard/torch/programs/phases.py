"""The steps of a program on a rank, and the memory of its shards between them.

1. Each step is a phase: a change of layout within this rank's group. An all-reduce has two phases:
   contributions are combined in parts of the shard, a part per rank, and the parts are gathered.
2. The shards between phases are stored in buffers. A slice is a view of the shard before it, and a
   shard to be gathered is a view of the shard after it, so most programs need no memory between
   source and target::

       source --slice--> buffer 1 --all-to-all--> buffer 2 --gather--> target
         |                   |                      |                   |
         +- is a view of it -+                      +- is a view of it -+

3. Only a buffer that is neither needs memory: from the first use of its shard, until no later shard
   is stored in it.

All of it follows from the program, so every rank derives the same phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from reshard.collectives.program import Program
from reshard.collectives.steps import AllGather, AllReduce, Exchange, Permute, Slice, Step
from reshard.dtypes import dtype as as_dtype
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.plans.schedule import align, are_cut_alike
from reshard.torch.exchange.packing.messages import RankTransfers, transfers_of

Kind = Literal["local", "exchange", "all-gather"]
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """The work of a rank between two buffers.

    Args:
        kind: whether elements stay on the rank, are sent as messages, or are gathered.
        step: of the program.
        change: of the group's layouts; for a permutation and an exchange, of all ranks' layouts.
        ranks: of the group; empty if this rank takes no part.
    """

    kind: Kind
    step: Step
    change: LayoutChange
    ranks: tuple[int, ...]

    @property
    def by_region(self) -> bool:
        """Whether contributions are sent and combined region by region."""
        change = self.change
        if not self.ranks or isinstance(self.step, Permute | Exchange):
            return False
        is_combined = change.source.contributions > change.target.contributions
        return is_combined and are_cut_alike(change)

    def transfers(self, rank: int) -> Transfers:
        """Return a rank's transfers, including those that stay on it."""
        if isinstance(self.step, Permute):
            # Send whole shards by the pairs of the step, whichever ranks have replicas of them.
            return _permute_shards(self.step, rank)
        if isinstance(self.step, Exchange):
            # Choose senders as in any plan; by elements, since all have the same dtype.
            return transfers_of(self.change, as_dtype("uint8"), rank)
        return self.change.for_rank(rank) if self.ranks else Transfers.none(self.change.source.ndim)


@dataclass(frozen=True, slots=True, eq=False)
class RankPhases:
    """The phases of a rank, and the buffers before, between and after them.

    Attributes:
        phases: in order.
        layouts: of the shards in each buffer. Contributions are not distinguished.
        inside: for each buffer, the buffer that it is a view of; itself if it is not a view.
    """

    phases: tuple[Phase, ...]
    layouts: tuple[Layout, ...]
    inside: tuple[int, ...]

    def root(self, buffer: int) -> int:
        """Return the buffer whose memory a buffer is in."""
        while self.inside[buffer] != buffer:
            buffer = self.inside[buffer]
        return buffer

    def is_view(self, phase: int) -> bool:
        """Return whether staying elements are in place: one shard is a part of the other."""
        return self.inside[phase] == phase + 1 or self.inside[phase + 1] == phase

    def max_elements(self, buffer: int) -> int:
        """Return the elements of the largest shard in a buffer."""
        return int(self.layouts[buffer].cell_shape.prod(axis=1).max(initial=0))

    def between_elements(self, phase: int) -> int:
        """Return the maximum over ranks of a phase's elements in neither source nor target."""
        roots = {self.root(phase), self.root(phase + 1)} - {0, len(self.phases)}
        return sum(map(self.max_elements, roots))

    @property
    def most_between_elements(self) -> int:
        """Return the maximum over phases."""
        return max(map(self.between_elements, range(len(self.phases))), default=0)

    @property
    def own_elements(self) -> tuple[int, ...]:
        """Return the maximum over ranks of each memory that is in neither source nor target."""
        roots = set(map(self.root, self.inside)) - {0, len(self.phases)}
        return tuple(map(self.max_elements, sorted(roots)))


def between_bytes(program: Program, itemsize_bytes: int) -> int:
    """Return the bytes between source and target of a program if no shard is freed early."""
    phases = phases_of(program, program.source.mesh.devices[0])
    return sum(align(elements * itemsize_bytes) for elements in phases.own_elements)


@lru_cache(maxsize=1024)
def phases_of(program: Program, rank: int) -> RankPhases:
    """Return the phases of a rank.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> program = find_program(spec(mesh, "-, - | sum(x)"), spec(mesh, "-, -"), (8, 4))
    >>> found = phases_of(program, rank=3)
    >>> [(phase.kind, phase.ranks, inside) for phase, inside in zip(*[
    ...     found.phases, found.inside[1:]])]
    [('exchange', (1, 3), 2), ('all-gather', (1, 3), 2)]
    """
    phases: list[Phase] = []
    layouts = [program.source.layout(program.shape)]
    for step in program.steps:
        # A rank takes part in the collective of its own group only.
        number = next((i for i, group in enumerate(step.groups) if rank in group), None)
        change, ranks = LayoutChange(step.source_layout, step.target_layout), tuple[int, ...]()
        if number is not None and not isinstance(step, Permute):
            change, ranks = step.changes[number], step.groups[number]
        if isinstance(step, AllReduce):
            parts = Layout.from_boxes(
                program.shape, [pair for group in step.groups for pair in _cut_shard(step, group)]
            )
            own = Layout.from_boxes(program.shape, _cut_shard(step, ranks)) if ranks else parts
            # Each rank combines a part and sends the result, so that no contribution is sent twice.
            phases.append(Phase("exchange", step, LayoutChange(change.source, own), ranks))
            phases.append(Phase("all-gather", step, LayoutChange(own, change.target), ranks))
            layouts += [parts, step.target_layout]
        else:
            phases.append(Phase(_find_kind(step), step, change, ranks))
            layouts.append(step.target_layout)
    return RankPhases(tuple(phases), tuple(layouts), _find_views(phases, layouts))


def _find_kind(step: Step) -> Kind:
    if isinstance(step, Slice):
        return "local"
    return "all-gather" if isinstance(step, AllGather) else "exchange"


def _find_views(phases: list[Phase], layouts: list[Layout]) -> tuple[int, ...]:
    inside = list(range(len(layouts)))
    for number in range(1, len(layouts) - 1):
        before, after = phases[number - 1], phases[number]
        # A slice is a view of the shard before it; shards to gather are views of the result.
        if before.kind == "local" and _lies_in(layouts[number], layouts[number - 1]):
            inside[number] = number - 1
        elif after.kind == "all-gather" and _lies_in(layouts[number], layouts[number + 1]):
            inside[number] = number + 1
    return tuple(inside)


def _lies_in(inner: Layout, outer: Layout) -> bool:
    """Return whether each rank's inner shard is a part of its outer shard."""
    for rank in inner.holders:
        box, around = shard_box(inner, rank), shard_box(outer, rank)
        if box is not None and box.elements:
            if around is None:
                return False
            corners = zip(around.start, box.start, box.stop, around.stop, strict=True)
            if not all(a <= b and c <= d for a, b, c, d in corners):
                return False
    return True


def shard_box(layout: Layout, rank: int) -> Box | None:
    """Return a rank's box of a sharding, or None."""
    boxes = layout.boxes(rank) if rank < layout.slots else ()
    return boxes[0] if boxes else None


def _cut_shard(step: Step, group: tuple[int, ...]) -> list[tuple[int, Box]]:
    """Split a group's shard into a part for each rank, along the first dimension long enough."""
    whole = shard_box(step.target_layout, group[0]) if group else None
    if whole is None or not whole.elements:
        return []
    if not whole.shape:
        return [(group[0], whole)]
    # Parts along the first dimension that is long enough are dense, and nearly equal in size.
    dim = next((d for d, n in enumerate(whole.shape) if n >= 8 * len(group)), None)
    if dim is None:
        dim = int(np.argmax(whole.shape))
    parts = []
    for place, rank in enumerate(group):
        low, high = (whole.shape[dim] * (place + i) // len(group) for i in (0, 1))
        if low < high:
            start, stop = list(whole.start), list(whole.stop)
            start[dim], stop[dim] = whole.start[dim] + low, whole.start[dim] + high
            parts.append((rank, Box(tuple(start), tuple(stop))))
    return parts


# Cached, since programs run repeatedly, each time on other tensors.
@lru_cache(maxsize=4096)
def directions_of(phase: Phase, rank: int, only_moving: bool) -> tuple[Transfers, Transfers]:
    """Return a phase's transfers into a rank, and out of it; no local ones if `only_moving`."""
    transfers = phase.transfers(rank)
    if only_moving:
        transfers = transfers.moving
    into = transfers.target_slot == rank
    return transfers.take(into), transfers.take(~into)


def _permute_shards(step: Permute, rank: int) -> Transfers:
    """Return the whole shards sent to and from a rank."""
    slots, cells, boxes = [], [], []
    for sender, receiver in step.pairs:
        box = shard_box(step.target_layout, receiver)
        if rank in (sender, receiver) and box is not None and box.elements:
            slots.append((sender, receiver))
            cells.append(
                (step.source_layout.cells_of(sender)[0], step.target_layout.cells_of(receiver)[0])
            )
            boxes.append((box.start, box.shape))
    of_slot, of_cell = (
        np.array(pairs, dtype=np.int64).reshape(-1, 2).T for pairs in (slots, cells)
    )
    corners = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, len(step.shape))
    nowhere = np.zeros_like(corners[:, 0])
    order, stays = np.zeros(len(boxes), dtype=np.int64), of_slot[0] == of_slot[1]
    return Transfers(
        of_slot[0],
        of_slot[1],
        of_cell[0],
        of_cell[1],
        order,
        stays,
        corners[:, 0],
        corners[:, 1],
        nowhere,
        nowhere,
    )


class ShardBuffers:
    """The shards of a rank before, between and after the phases.

    Args:
        phases: of this rank.
        rank: this rank.
        source, target: its local tensors, or None.
        dtype, device: of the memory for other shards.
        allocate: allocates memory by shape and dtype; new memory by default.
    """

    def __init__(
        self,
        phases: RankPhases,
        rank: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
    ) -> None:
        self._phases = phases
        self._rank = rank
        self._ends = {0: source, len(phases.phases): target}
        self._allocated: dict[int, torch.Tensor] = {}
        self._dtype = dtype
        self._device = device
        self._allocate = allocate

    def transfers(self) -> Iterator[tuple[int, RankTransfers]]:
        """Yield the phases with transfers: the number of each, and this rank's transfers in it.

        Memory for a phase is allocated when it is requested, and freed at the next phase if no
        later shard is in it. All ranks have the same phases.
        """
        for number, phase in enumerate(self._phases.phases):
            is_there = self._phases.is_view(number)
            # A slice that is a view transfers nothing.
            if phase.kind == "local" and is_there:
                continue
            # Overlapping shards have the staying elements in place, so only the others are listed.
            received, sent = directions_of(phase, self._rank, only_moving=is_there)
            shards = [self._find_shard(number)], [self._find_shard(number + 1)]
            yield number, RankTransfers(phase.change, received, sent, *shards, self._dtype)
            self._free_before(number + 1)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of allocated memory."""
        return sum(tensor.nbytes for tensor in self._allocated.values())

    def _find_shard(self, number: int) -> torch.Tensor | None:
        """Return the shard in a buffer, or None."""
        if number in self._ends:
            return self._ends[number]
        layout, inside = self._phases.layouts[number], self._phases.inside[number]
        shape = layout.local_shape(self._rank) if self._rank < layout.slots else None
        if shape is None:
            return None
        box = shard_box(layout, self._rank)
        if box is None or not box.elements:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        # A shard within a larger shard is a view of it.
        if inside != number:
            outer = self._find_shard(inside)
            around = shard_box(self._phases.layouts[inside], self._rank)
            if outer is not None and around is not None:
                corners = zip(around.start, box.start, box.stop, strict=True)
                return outer[tuple(slice(a - low, b - low) for low, a, b in corners)]
        if number not in self._allocated:
            self._allocated[number] = self._take(shape)
        return self._allocated[number]

    def _take(self, shape: Sequence[int]) -> torch.Tensor:
        if self._allocate is not None:
            return self._allocate(shape, self._dtype)
        return torch.empty(tuple(shape), dtype=self._dtype, device=self._device)

    def _free_before(self, number: int) -> None:
        """Free the memory that no later buffer is in."""
        later = {self._phases.root(buffer) for buffer in range(number, len(self._phases.inside))}
        self._allocated = {
            root: memory for root, memory in self._allocated.items() if root in later
        }
