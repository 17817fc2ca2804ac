"""A plan of a refit: the tensors to move as one job, the share of each rank, and batches.

A `RefitPlan` is the whole: the tensors that match. A `RefitPart` is one rank's share.

Tensors that a transform makes need memory to arrive in, so they go in batches, one after another.
So do programs of collectives that have shards between source and target. All others go before
them, straight into the target: in one batch, or in several that are called buckets, so that some
tensors are complete while others travel::

    batch      0    1    2          3    4
    what       buckets              transforms and programs, which need memory
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job
from reshard.plans.schedule import (
    ALIGNMENT_BYTES,
    PipelineSpan,
    align,
    divide_pipelines,
    fill_batches,
)
from reshard.topology import Topology
from reshard.torch.programs.phases import between_bytes
from reshard.torch.programs.run import method_digest
from reshard.torch.refitting.matching import Match
from reshard.torch.refitting.methods import BY_EXCHANGE, TensorMethod, job_of
from reshard.torch.refitting.report import ReportedMethods, report_methods
from reshard.torch.refitting.tied_sources import DistantPair

# The most buckets, since each has messages of its own.
_MAX_BUCKETS = 256


class PartItem(NamedTuple):
    """One tensor on one rank: what it sends, keeps and receives of it, and in which batch.

    What moves by a program has no transfers of its own. What is staged is also
    `handed_on`, in the stages behind the first; `span` is its place in the pipeline. What is staged
    only in runs in which all of it travels has `whole_stages` for these.
    """

    match: Match
    change: LayoutChange
    transfers: Transfers
    batch: int
    chosen: TensorMethod = BY_EXCHANGE
    handed_on: tuple[Transfers, ...] = ()
    whole_stages: tuple[Transfers, ...] = ()
    span: PipelineSpan = PipelineSpan()

    @property
    def stages(self) -> tuple[tuple[LayoutChange, Transfers], ...]:
        """Its transfers stage by stage, each with the change of layouts that they are of."""
        within = LayoutChange(self.change.target, self.change.target)
        return ((self.change, self.transfers), *((within, rows) for rows in self.handed_on))


@dataclass(frozen=True, eq=False)
class RefitPart:
    """What one rank does: its tensors in the order of all, and how many batches there are.

    The first `buckets` of them go straight into the target. `staging_bytes` is what the largest
    of the others needs beside messages. `digest` is of the whole plan, the same on every rank.
    """

    items: tuple[PartItem, ...]
    batches: int
    staging_bytes: int
    digest: str
    buckets: int = 1

    @cached_property
    def target_names(self) -> frozenset[str]:
        """The target's tensors that this rank has a part in."""
        return frozenset([item.match.target_name for item in self.items])

    @cached_property
    def made(self) -> tuple[Match, ...]:
        """What transforms have a part in."""
        return tuple([item.match for item in self.items if item.match.made_at])

    @cached_property
    def methods(self) -> ReportedMethods:
        """How its tensors move."""
        return report_methods((item.match.name, item.chosen) for item in self.items)


@dataclass(frozen=True)
class RefitPlan:
    """All tensors of a refit, the same on every rank that works it out.

    Args:
        matches: the tensors.
        staging_bytes: the most memory for what lies between source and target.
        methods: how each moves, in their order; all in the exchange when empty.
        buckets: what goes straight into the target goes in buckets of at most so many bytes, or
            of these numbers for the source's tensors; in one when None.
        known_parts: of ranks, as far as `own_part` worked them out.
        topology: the hosts of what moves in stages.
        tied: tensors of the source that are declared to be one, and are on different ranks.

    Raises UsageError where a tensor that is transformed needs more than `staging_bytes`.
    """

    matches: tuple[Match, ...]
    staging_bytes: int
    methods: tuple[TensorMethod, ...] = ()
    buckets: int | Mapping[str, int] | None = None
    known_parts: dict[int, RefitPart] = field(default_factory=dict, compare=False, repr=False)
    topology: Topology | None = None
    tied: tuple[DistantPair, ...] = ()

    @cached_property
    def moves(self) -> tuple[tuple[Match, TensorMethod], ...]:
        """Every match and how it moves."""
        methods = self.methods or (BY_EXCHANGE,) * len(self.matches)
        return tuple(zip(self.matches, methods, strict=True))

    @cached_property
    def job(self) -> Job:
        """What is exchanged."""
        return job_of(one for one, by in self.moves if not by.program and not by.is_staged)

    @cached_property
    def staged(self) -> StagedJob | None:
        """What moves in stages; None where nothing does."""
        matches = [match for match, chosen in self.moves if _has_stages(chosen)]
        if not matches or self.topology is None:
            return None
        return StagedJob(job_of(matches), self.topology)

    @cached_property
    def spans(self) -> dict[str, PipelineSpan]:
        """The place of each staged tensor in the pipeline of its batch."""
        sizes: dict[int, dict[str, int]] = {}
        for (match, chosen), batch in zip(self.moves, self.batches, strict=True):
            if _has_stages(chosen):
                sizes.setdefault(batch, {})[match.name] = count_bytes(match)
        return divide_pipelines(sizes.values(), self.staged.parts if self.staged else 1)

    @cached_property
    def digest(self) -> str:
        """A digest that two ranks share exactly when they mean the same refit."""
        hasher = hashlib.blake2b(self.job.digest.encode(), digest_size=16)
        hasher.update(self.staged.digest.encode() if self.staged is not None else b"")
        for match, chosen in self.moves:
            if chosen.program is not None:
                hasher.update(f"{match.name}\0{match.dtype}\0".encode())
                hasher.update(match.source.fingerprint + method_digest(chosen.program))
        return hasher.hexdigest()

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """The batch of every match: as many that need memory as fit, in their order."""
        needed_bytes: dict[str, int] = {}
        for one, size_bytes in self._staged_bytes.values():
            name = one.made_of or one.name
            needed_bytes[name] = needed_bytes.get(name, 0) + size_bytes
        # All pieces of what one transform makes are there at once.
        for name, size_bytes in needed_bytes.items():
            if size_bytes > self.staging_bytes:
                raise UsageError(
                    f"{name!r} is transformed, for which a rank needs {size_bytes} bytes, and "
                    f"extra_bytes leaves {self.staging_bytes}; give at least {2 * size_bytes}"
                )
        # Batches behind the buckets, filled in the order of the tensors.
        batch_of = fill_batches(needed_bytes, self.staging_bytes)
        buckets = max(self.bucket_of.values(), default=0) + 1
        if not batch_of and buckets == 1:
            return (0,) * len(self.matches)
        return tuple(
            buckets + batch_of[one.made_of or one.name]
            if number in self._staged_bytes
            else self.bucket_of[one.name]
            for number, one in enumerate(self.matches)
        )

    @cached_property
    def _staged_bytes(self) -> dict[int, tuple[Match, int]]:
        """By its number, each match that has elements between source and target, and their bytes.

        What a transform makes needs memory even where it is nothing.
        """
        # Most matches are neither: very many are looked through.
        numbered = [
            (number, one, chosen)
            for number, (one, chosen) in enumerate(self.moves)
            if one.made_at or chosen.program is not None
        ]
        needed = ((number, one, staging_bytes(one, chosen)) for number, one, chosen in numbered)
        return {number: (one, of) for number, one, of in needed if one.made_at or of}

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """The bucket of every match that goes straight into the target."""
        direct = [one for n, one in enumerate(self.matches) if n not in self._staged_bytes]
        if self.buckets is None:
            return dict.fromkeys([one.name for one in direct], 0)
        if isinstance(self.buckets, Mapping):
            last = max(self.buckets.values(), default=0)
            return {one.name: self.buckets.get(one.source_name, last) for one in direct}
        # All pieces of a tensor are in one bucket, so that it is complete with that.
        size_bytes: dict[str, int] = {}
        for one in direct:
            size_bytes[one.target_name] = size_bytes.get(one.target_name, 0) + count_bytes(one)
        limit_bytes = max(self.buckets, -(-sum(size_bytes.values()) // _MAX_BUCKETS))
        number_of = fill_batches(size_bytes, limit_bytes)
        return {one.name: number_of[one.target_name] for one in direct}

    @property
    def batch_count(self) -> int:
        """How many batches there are: one at least."""
        return max(self.batches, default=0) + 1

    @cached_property
    def complete_names(self) -> tuple[tuple[str, ...], ...]:
        """By batch, the target's tensors that are complete with it."""
        pairs = list(zip(self.batches, self.matches, strict=True))
        return list_complete_names(pairs, self.batch_count)

    def part(self, rank: int) -> RefitPart:
        """What one rank does."""
        transfers = self.job.for_rank(rank).shared()
        changes = {item.name: item.change for item in self.job.items}
        handed_on: dict[str, tuple[Transfers, ...]] = {}
        when_whole: dict[str, tuple[Transfers, ...]] = {}
        if self.staged is not None:
            for item, stages in zip(self.staged.job.items, self.staged.for_rank(rank), strict=True):
                if item.name in changes:
                    # It is exchanged in all other runs.
                    when_whole[item.name] = tuple(stages)
                elif any(map(len, stages)):
                    transfers[item.name], *others = stages
                    handed_on[item.name] = tuple(others)
            changes |= {item.name: item.change for item in self.staged.job.items}
        # What one transform makes at the source, it makes together.
        made = {m.made_of for m in self.matches if m.made_at == "source" and m.name in transfers}
        items = []
        spans, no_span = self.spans, PipelineSpan()
        for (one, chosen), batch in zip(self.moves, self.batches, strict=True):
            name = one.name
            moving = transfers.get(name)
            if (
                moving is None
                and one.made_of not in made
                and not any(map(len, when_whole.get(name, ())))
                and rank not in one.target.local_shapes
                and (chosen.program is None or rank not in chosen.program.source.mesh.devices)
            ):
                continue
            if moving is None:
                moving = Transfers.none(len(one.source.shape))
            change = changes.get(name) or LayoutChange(one.source, one.target)
            rest = handed_on.get(name, ()), when_whole.get(name, ()), spans.get(name, no_span)
            items.append(PartItem(one, change, moving, batch, chosen, *rest))
        # All batches share one arena, which must be as large as the fullest of them needs.
        filled_bytes = [0] * self.batch_count
        for number, (_, size_bytes) in self._staged_bytes.items():
            filled_bytes[self.batches[number]] += size_bytes
        buckets = max(self.bucket_of.values(), default=0) + 1
        return RefitPart(tuple(items), self.batch_count, max(filled_bytes), self.digest, buckets)

    def own_part(self, rank: int) -> RefitPart:
        """What this rank does, worked out once; `part` keeps nothing."""
        if rank not in self.known_parts:
            self.known_parts[rank] = self.part(rank)
        return self.known_parts[rank]

    def parts(self, ranks: Sequence[int]) -> Iterable[RefitPart]:
        """What each of the ranks does, one after the other."""
        return (self.part(rank) for rank in ranks)


def list_complete_names(
    pairs: Sequence[tuple[int, Match]], batches: int
) -> tuple[tuple[str, ...], ...]:
    """By batch, the targets of matches in batches `(batch, match)` that are complete with it."""
    last: dict[str, int] = {}
    for batch, match in pairs:
        # What a transform makes is complete with all that it is made of.
        for name in {match.target_name, match.made_of or match.target_name}:
            last[name] = max(last.get(name, 0), batch)
    names: list[list[str]] = [[] for _ in range(batches)]
    for name, batch in last.items():
        names[batch].append(name)
    return tuple(map(tuple, names))


def staging_limit_bytes(extra_bytes: int) -> int:
    """How much of a limit is for what lies between source and target; the rest is for messages."""
    return extra_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def staging_bytes(match: Match, chosen: TensorMethod = BY_EXCHANGE) -> int:
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
        # Of each rank, all of its cells.
        np.add.at(elements, layout.cell_slot, layout.cell_shape.prod(axis=1))
        found_bytes += align(int(elements.max(initial=0)) * itemsize)
    return found_bytes


def count_bytes(match: Match) -> int:
    """Of its elements, as they travel."""
    return math.prod(match.target.shape) * as_dtype(match.dtype).itemsize_bytes


def _has_stages(chosen: TensorMethod) -> bool:
    return chosen.is_staged or chosen.is_staged_whole
