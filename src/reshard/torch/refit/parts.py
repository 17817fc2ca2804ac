"""What does each rank do in a refit, and who works that out?

A `RefitPlan` is the whole: tensors that match, as one job. A `RefitPart` is one rank's share of
it. Every rank can work out its own (*local*), or the first rank works out all of them and gives
each its own (*centralized*); the parts are the same.

Tensors that a transform makes need memory to arrive in, so they go in batches, one behind the
other. So do programs of collectives that have shards between source and target. All others go in
the first batch, straight into the target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.job import Job, JobItem
from reshard.torch.exchange.messages import ALIGNMENT_BYTES, aligned
from reshard.torch.programs.methods import method_digest
from reshard.torch.programs.phases import between_bytes
from reshard.torch.refit.matching import Match
from reshard.torch.refit.methods import IN_EXCHANGE, Chosen

DIRECT = 0


@dataclass(frozen=True, slots=True, eq=False)
class PartItem:
    """One tensor on one rank: what it sends, keeps and receives of it, and in which batch.

    What moves by a program has no transfers of its own.
    """

    match: Match
    plan: LayoutChange
    transfers: Transfers
    batch: int
    chosen: Chosen = IN_EXCHANGE


@dataclass(frozen=True, slots=True, eq=False)
class RefitPart:
    """What one rank does: its tensors in the order of all, and how many batches there are.

    `staging_bytes` is what the largest batch needs beside messages. `digest` is of the
    whole plan, the same on every rank.
    """

    items: tuple[PartItem, ...]
    batches: int
    staging_bytes: int
    digest: str


@dataclass(frozen=True)
class RefitPlan:
    """All tensors of a refit, the same on every rank that works it out.

    Args:
        matches: the tensors.
        staging_bytes: the most memory for what lies between source and target.
        methods: how each moves, in their order; all in the exchange when empty.

    Raises UsageError where a tensor that is transformed needs more than `staging_bytes`.
    """

    matches: tuple[Match, ...]
    staging_bytes: int
    methods: tuple[Chosen, ...] = ()

    @cached_property
    def moves(self) -> tuple[tuple[Match, Chosen], ...]:
        """Every match and how it moves."""
        methods = self.methods or (IN_EXCHANGE,) * len(self.matches)
        return tuple(zip(self.matches, methods, strict=True))

    @cached_property
    def job(self) -> Job:
        """What is exchanged, as one job, so that senders are chosen for all together."""
        return Job(
            JobItem.between_ranks(m.name, as_dtype(m.dtype), m.source, m.target)
            for m, chosen in self.moves
            if chosen.program is None
        )

    @cached_property
    def digest(self) -> str:
        """A digest that two ranks share exactly when they mean the same refit."""
        hasher = hashlib.blake2b(self.job.digest.encode(), digest_size=16)
        for match, chosen in self.moves:
            if chosen.program is not None:
                hasher.update(f"{match.name}\0{match.dtype}\0".encode())
                hasher.update(match.source.fingerprint + method_digest(chosen.program))
        return hasher.hexdigest()

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """The batch of every match: as many that need memory as fit, in their order."""
        needed_bytes: dict[str, int] = {}
        for one, chosen in self.moves:
            if _needs_memory(one, chosen):
                name = one.made_of or one.name
                needed_bytes[name] = needed_bytes.get(name, 0) + staging_bytes(one, chosen)
        # All pieces of what one transform makes are there at once.
        batch_of: dict[str, int] = {}
        number, filled_bytes = DIRECT, 0
        for name, size_bytes in needed_bytes.items():
            if size_bytes > self.staging_bytes:
                raise UsageError(
                    f"{name!r} is transformed, for which a rank needs {size_bytes} bytes, and "
                    f"extra_bytes leaves {self.staging_bytes}; give at least {2 * size_bytes}"
                )
            if number == DIRECT or filled_bytes + size_bytes > self.staging_bytes:
                number, filled_bytes = number + 1, 0
            filled_bytes += size_bytes
            batch_of[name] = number
        return tuple(
            batch_of[one.made_of or one.name] if _needs_memory(one, chosen) else DIRECT
            for one, chosen in self.moves
        )

    def part(self, rank: int) -> RefitPart:
        """What one rank does."""
        transfers = self.job.for_rank(rank)
        plans = {item.name: item.change for item in self.job.items}
        # What one transform makes at the source, it makes together.
        made = {m.made_of for m in self.matches if m.made_at == "source" and m.name in transfers}
        items = [
            PartItem(
                one,
                plans.get(one.name) or LayoutChange(one.source, one.target),
                transfers.get(one.name, Transfers.none(len(one.source.shape))),
                batch,
                chosen,
            )
            for (one, chosen), batch in zip(self.moves, self.batches, strict=True)
            if one.name in transfers
            or one.made_of in made
            or _holds(one.target, rank)
            or (chosen.program is not None and rank in chosen.program.source.mesh.devices)
        ]
        batches = max(self.batches, default=DIRECT) + 1
        filled_bytes = [0] * batches
        for (one, chosen), batch in zip(self.moves, self.batches, strict=True):
            filled_bytes[batch] += staging_bytes(one, chosen) if batch != DIRECT else 0
        return RefitPart(tuple(items), batches, max(filled_bytes), self.digest)

    def parts(self, ranks: Sequence[int]) -> Iterable[RefitPart]:
        """What each of the ranks does, one after the other."""
        return (self.part(rank) for rank in ranks)


def staging_limit_bytes(extra_bytes: int) -> int:
    """How much of a limit is for what lies between source and target; the rest is for messages."""
    return extra_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def staging_bytes(match: Match, chosen: Chosen = IN_EXCHANGE) -> int:
    """The most that a rank needs between source and target of a tensor.

    That is what it sends and receives of one that a transform makes; what is made at the source is
    received in place. Of a program it is the shards between its steps.
    """
    itemsize = as_dtype(match.dtype).itemsize_bytes
    if chosen.program is not None:
        return between_bytes(chosen.program, itemsize)
    found_bytes = 0
    for layout in (match.source, match.target)[: 1 if match.made_at == "source" else 2]:
        elements = np.zeros(layout.slots, dtype=np.int64)
        np.add.at(elements, layout.cell_slot, layout.cell_shape.prod(axis=1))
        found_bytes += aligned(int(elements.max(initial=0)) * itemsize)
    return found_bytes


def _needs_memory(match: Match, chosen: Chosen) -> bool:
    return match.is_transformed or (chosen.program is not None and staging_bytes(match, chosen) > 0)


def _holds(layout: Layout, rank: int) -> bool:
    return rank < layout.slots and bool(layout.cells_of(rank))
