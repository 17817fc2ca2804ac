"""Where do this rank's shards lie between the phases of a program?

In the source, in the target, or in memory of their own: see `reshard.torch.programs.phases`, which
says which. Memory is taken when a shard is first wanted, and given back when no later one is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from reshard.torch.programs.phases import Phases, shard_box

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
