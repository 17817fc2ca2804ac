"""The steps of a program on one rank, and where its shards lie between them.

1. Each step is a phase: what this rank's group holds and needs, as a change of layout within the
   group alone. An all-reduce is two: contributions are combined in parts of the shard, one a rank,
   and the parts are gathered.
2. The shards between phases are places. A slice is a view of the shard before it, and what is
   gathered lies inside the shard after it already, so most programs need no memory between source
   and target::

       source ---slice---> place 1 ---all-to-all---> place 2 ---gather---> target
         |                    |                         |                    |
         +-- is a view of it -+                         +-- is a view of it -+

3. Only a place that is neither takes memory: from when the shard is first wanted, until no later
   one lies in it.

All of it follows from the program, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from reshard.collectives.program import Program
from reshard.collectives.steps import AllGather, AllReduce, Exchange, Permute, Slice, Step
from reshard.dtypes import dtype as as_dtype
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.torch.exchange.messages import aligned, transfers_of

LOCAL = "local"
MESSAGES = "messages"
ALL_TO_ALL = "all-to-all"
GATHER = "gather"


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """What one rank does from one place to the next.

    Args:
        kind: how elements travel.
        step: what it is of.
        plan: of the group; over all ranks where they travel as messages.
        ranks: of the group, none where this rank has no part.
    """

    kind: str
    step: Step
    plan: LayoutChange
    ranks: tuple[int, ...]

    def transfers(self, rank: int) -> Transfers:
        """What a rank receives, keeps and sends."""
        if isinstance(self.step, Permute):
            return _permuted(self.step, rank)
        if isinstance(self.step, Exchange):
            return transfers_of(self.plan, as_dtype("uint8"), rank)
        return self.plan.for_rank(rank) if self.ranks else Transfers.none(self.plan.source.ndim)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the shards between two phases lie.

    Args:
        layout: what each rank has there. Contributions are not told apart.
        inside: the number of the place that this one is a view of; its own where of none.
    """

    layout: Layout
    inside: int

    @property
    def largest_elements(self) -> int:
        """Elements of the largest shard."""
        return int(self.layout.cell_shape.prod(axis=1).max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """The phases of one rank, and the places before, between and after them."""

    phases: tuple[Phase, ...]
    places: tuple[Place, ...]

    def root(self, place: int) -> int:
        """The place whose memory a place is in."""
        while self.places[place].inside != place:
            place = self.places[place].inside
        return place

    def is_view(self, phase: int) -> bool:
        """Whether what stays in a phase is where it has to be: one shard is a part of the other."""
        one, other = self.places[phase], self.places[phase + 1]
        return one.inside == phase + 1 or other.inside == phase

    def between_elements(self, phase: int) -> int:
        """Elements of memory that is neither source nor target, the most of any rank."""
        roots = {self.root(phase), self.root(phase + 1)} - {0, len(self.phases)}
        return sum(self.places[root].largest_elements for root in roots)

    @property
    def most_between_elements(self) -> int:
        """The most of any phase."""
        return max(map(self.between_elements, range(len(self.phases))), default=0)

    @property
    def own_elements(self) -> tuple[int, ...]:
        """Elements of each memory that is neither source nor target, the most of any rank."""
        roots = {self.root(place) for place in range(len(self.places))}
        return tuple(
            self.places[root].largest_elements for root in sorted(roots - {0, len(self.phases)})
        )

    @property
    def peers(self) -> int:
        """The most other ranks in any rank's group."""
        return max((len(g) - 1 for p in self.phases for g in p.step.groups), default=0)


def between_bytes(program: Program, itemsize_bytes: int) -> int:
    """Bytes between source and target of a program all of whose shards are kept to the end."""
    found = phases_of(program, program.source.mesh.devices[0])
    return sum(aligned(elements * itemsize_bytes) for elements in found.own_elements)


@lru_cache(maxsize=256)
def phases_of(program: Program, rank: int) -> Phases:
    """The phases of one rank.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> program = find_program(spec(mesh, "-, - | sum(x)"), spec(mesh, "-, -"), (8, 4))
    >>> found = phases_of(program, rank=3)
    >>> [(phase.kind, phase.ranks, place.inside) for phase, place in zip(*[
    ...     found.phases, found.places[1:]])]
    [('all-to-all', (1, 3), 2), ('gather', (1, 3), 2)]
    """
    phases: list[Phase] = []
    layouts = [program.source.layout(program.shape)]
    for step in program.steps:
        number = next((i for i, group in enumerate(step.groups) if rank in group), None)
        plan, ranks = LayoutChange(step.source_layout, step.target_layout), tuple[int, ...]()
        if number is not None and not isinstance(step, Permute):
            plan, ranks = step.plans[number], step.groups[number]
        if isinstance(step, AllReduce):
            parts = Layout.from_boxes(
                program.shape, [pair for group in step.groups for pair in _parts(step, group)]
            )
            own = Layout.from_boxes(program.shape, _parts(step, ranks)) if ranks else parts
            phases.append(Phase(ALL_TO_ALL, step, LayoutChange(plan.source, own), ranks))
            phases.append(Phase(GATHER, step, LayoutChange(own, plan.target), ranks))
            layouts += [parts, step.target_layout]
        else:
            phases.append(Phase(_kind(step), step, plan, ranks))
            layouts.append(step.target_layout)
    return Phases(tuple(phases), _places(phases, layouts))


def _kind(step: Step) -> str:
    if isinstance(step, Slice):
        return LOCAL
    if isinstance(step, Permute | Exchange):
        return MESSAGES
    return GATHER if isinstance(step, AllGather) else ALL_TO_ALL


def _places(phases: list[Phase], layouts: list[Layout]) -> tuple[Place, ...]:
    inside = list(range(len(layouts)))
    for number in range(1, len(layouts) - 1):
        before, after = phases[number - 1], phases[number]
        if before.kind == LOCAL and _lies_in(layouts[number], layouts[number - 1]):
            inside[number] = number - 1
        elif after.kind == GATHER and _lies_in(layouts[number], layouts[number + 1]):
            inside[number] = number + 1
    return tuple(map(Place, layouts, inside))


def _lies_in(inner: Layout, outer: Layout) -> bool:
    """Whether each rank's shard is a part of its other one."""
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
    """A rank's one box of a sharding; None where it has none."""
    boxes = layout.boxes(rank) if rank < layout.slots else ()
    return boxes[0] if boxes else None


def _parts(step: Step, group: tuple[int, ...]) -> list[tuple[int, Box]]:
    """A group's shard in one part a rank, along the first dimension that is long enough."""
    whole = shard_box(step.target_layout, group[0]) if group else None
    if whole is None or not whole.elements:
        return []
    if not whole.shape:
        return [(group[0], whole)]
    dim = next((d for d, n in enumerate(whole.shape) if n >= 8 * len(group)), None)
    if dim is None:
        dim = int(np.argmax(whole.shape))
    found = []
    for place, rank in enumerate(group):
        low, high = (whole.shape[dim] * (place + i) // len(group) for i in (0, 1))
        if low < high:
            start, stop = list(whole.start), list(whole.stop)
            start[dim], stop[dim] = whole.start[dim] + low, whole.start[dim] + high
            found.append((rank, Box(tuple(start), tuple(stop))))
    return found


def _permuted(step: Permute, rank: int) -> Transfers:
    """The whole shards that come to a rank and leave it."""
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


Memory = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class Places:
    """The shards of one rank before, between and after the phases.

    Args:
        phases: of this rank.
        rank: this one.
        source, target: its local tensors, None where it has none.
        dtype, device: of what lies in neither.
        memory: gives that memory, by shape and dtype; new one by default.
    """

    def __init__(
        self,
        phases: Phases,
        rank: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        memory: Memory | None = None,
    ) -> None:
        self._phases = phases
        self._rank = rank
        self._ends = {0: source, len(phases.phases): target}
        self._taken: dict[int, torch.Tensor] = {}
        self._dtype = dtype
        self._device = device
        self._memory = memory

    def at(self, number: int) -> torch.Tensor | None:
        """The shard at a place; None where this rank has none."""
        if number in self._ends:
            return self._ends[number]
        place = self._phases.places[number]
        layout = place.layout
        shape = layout.local_shape(self._rank) if self._rank < layout.slots else None
        if shape is None:
            return None
        box = shard_box(layout, self._rank)
        if box is None or not box.elements:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        if place.inside != number:
            outer = self.at(place.inside)
            around = shard_box(self._phases.places[place.inside].layout, self._rank)
            if outer is not None and around is not None:
                corners = zip(around.start, box.start, box.stop, strict=True)
                return outer[tuple(slice(a - low, b - low) for low, a, b in corners)]
        if number not in self._taken:
            self._taken[number] = self._new(shape)
        return self._taken[number]

    def _new(self, shape: Sequence[int]) -> torch.Tensor:
        if self._memory is not None:
            return self._memory(shape, self._dtype)
        return torch.empty(tuple(shape), dtype=self._dtype, device=self._device)

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory that was taken and not given back."""
        return sum(tensor.nbytes for tensor in self._taken.values())

    def free_before(self, number: int) -> None:
        """Give back what no place from this one on lies in."""
        places = range(number, len(self._phases.places))
        still = {self._phases.root(place) for place in places}
        self._taken = {root: held for root, held in self._taken.items() if root in still}
