"""A plan of a refit: all tensors to move as a single job, the share of each rank, and batches.

A `RefitPlan` has all matching tensors. A `RefitPart` is the share of a rank.

Tensors with a transform need memory to arrive in, so they move in batches, in order.
So do programs of collectives that have shards between source and target. All other tensors move
first, straight into the target: in a single batch, or in several batches called buckets, so that
some tensors are complete while others are sent::

    batch      0    1    2          3    4
    what       buckets              transforms and programs, which need memory
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans import schedule
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job
from reshard.topology import Topology
from reshard.torch.programs.phases import between_bytes
from reshard.torch.programs.run import method_digest
from reshard.torch.refitting.matching import Match
from reshard.torch.refitting.methods import BY_EXCHANGE, TensorMethod, job_of
from reshard.torch.refitting.tied_sources import DistantPair

# The maximum number of buckets, since each has its own messages.
_MAX_BUCKETS = 256


class PartItem(NamedTuple):
    """A tensor on a rank: its transfers (sent, kept and received), and its batch.

    A tensor that moves by a program is without transfers. A staged tensor also has `handed_on`, for
    the stages after the first; `span` is its position in the pipeline. A tensor that is staged only
    in runs that send all of it has `whole_stages` for these runs.
    """

    match: Match
    change: LayoutChange
    transfers: Transfers
    batch: int
    chosen: TensorMethod = BY_EXCHANGE
    handed_on: tuple[Transfers, ...] = ()
    whole_stages: tuple[Transfers, ...] = ()
    span: schedule.PipelineSpan = schedule.PipelineSpan()

    @property
    def stages(self) -> tuple[tuple[LayoutChange, Transfers], ...]:
        """The transfers of each stage, with their change of layouts."""
        within = LayoutChange(self.change.target, self.change.target)
        return ((self.change, self.transfers), *((within, rows) for rows in self.handed_on))


@dataclass(frozen=True, eq=False)
class RefitPart:
    """The share of a rank: its tensors in the common order, and the number of batches.

    The first `buckets` batches write straight into the target. `staging_bytes` is the memory that
    the largest other batch needs in addition to messages. `digest` identifies the whole plan, and
    is the same on every rank.
    """

    items: tuple[PartItem, ...]
    batches: int
    staging_bytes: int
    digest: str
    buckets: int = 1

    @cached_property
    def target_names(self) -> frozenset[str]:
        """The target tensors that this rank sends or receives."""
        return frozenset([item.match.target_name for item in self.items])

    @cached_property
    def made(self) -> tuple[Match, ...]:
        """The matches that have a transform."""
        return tuple([item.match for item in self.items if item.match.made_at])


@dataclass(frozen=True)
class RefitPlan:
    """All tensors of a refit, equal on every rank that computes it.

    Args:
        matches: the tensors.
        staging_bytes: the maximum memory between source and target.
        methods: how each moves, in their order; all in the exchange if empty.
        buckets: the maximum bytes of a bucket, or the bucket of each source tensor; for tensors
            that move straight into the target. A single bucket if None.
        known_parts: parts of ranks that `own_part` has computed.
        topology: the hosts of tensors that move in stages.
        tied: source tensors that are declared tied, and are on different ranks.

    Raises UsageError if a transformed tensor needs more than `staging_bytes`.
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
        """Every match with its method."""
        methods = self.methods or (BY_EXCHANGE,) * len(self.matches)
        return tuple(zip(self.matches, methods, strict=True))

    @cached_property
    def job(self) -> Job:
        """The exchanged tensors."""
        return job_of(
            match for match, method in self.moves if not method.program and not method.is_staged
        )

    @cached_property
    def staged(self) -> StagedJob | None:
        """The tensors that move in stages, or None without any."""
        matches = [match for match, chosen in self.moves if _has_stages(chosen)]
        if not matches or self.topology is None:
            return None
        return StagedJob(job_of(matches), self.topology)

    @cached_property
    def spans(self) -> dict[str, schedule.PipelineSpan]:
        """The position of each staged tensor in the pipeline of its batch."""
        sizes: dict[int, dict[str, int]] = {}
        for (match, chosen), batch in zip(self.moves, self.batches, strict=True):
            if _has_stages(chosen):
                sizes.setdefault(batch, {})[match.name] = count_bytes(match)
        return schedule.divide_pipelines(sizes.values(), self.staged.parts if self.staged else 1)

    @cached_property
    def digest(self) -> str:
        """A digest that is equal on two ranks exactly if they have the same plan."""
        hasher = hashlib.blake2b(self.job.digest.encode(), digest_size=16)
        hasher.update(self.staged.digest.encode() if self.staged is not None else b"")
        for match, chosen in self.moves:
            if chosen.program is not None:
                hasher.update(f"{match.name}\0{match.dtype}\0".encode())
                hasher.update(match.source.fingerprint + method_digest(chosen.program))
        return hasher.hexdigest()

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """The batch of every match. Matches that need memory share batches in their order."""
        needed_bytes: dict[str, int] = {}
        for match, size_bytes in self._staged_bytes.values():
            name = match.made_of or match.name
            needed_bytes[name] = needed_bytes.get(name, 0) + size_bytes
        # All pieces of a transformed tensor are in memory at once.
        for name, size_bytes in needed_bytes.items():
            # Half of `extra_bytes` is for staged elements (`staging_limit_bytes`).
            if size_bytes > self.staging_bytes:
                raise UsageError(
                    f"{name!r} is transformed, for which a rank needs {size_bytes} bytes, and "
                    f"extra_bytes leaves {self.staging_bytes}; give at least {2 * size_bytes}"
                )
        # Batches after the buckets, filled in the order of the tensors.
        batch_of = schedule.fill_batches(needed_bytes, self.staging_bytes)
        buckets = max(self.bucket_of.values(), default=0) + 1
        if not batch_of and buckets == 1:
            return (0,) * len(self.matches)
        return tuple(
            buckets + batch_of[match.made_of or match.name]
            if number in self._staged_bytes
            else self.bucket_of[match.name]
            for number, match in enumerate(self.matches)
        )

    @cached_property
    def _staged_bytes(self) -> dict[int, tuple[Match, int]]:
        """Matches with elements between source and target: by number, each with these bytes.

        A transform's output is included even if it is empty.
        """
        # Filter first: most matches have neither, and there may be very many.
        numbered = [
            (number, match, chosen)
            for number, (match, chosen) in enumerate(self.moves)
            if match.made_at or chosen.program is not None
        ]
        needed = (
            (number, match, staging_bytes(match, chosen)) for number, match, chosen in numbered
        )
        return {
            number: (match, size_bytes)
            for number, match, size_bytes in needed
            if match.made_at or size_bytes
        }

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """The bucket of every match that moves straight into the target."""
        direct = [match for n, match in enumerate(self.matches) if n not in self._staged_bytes]
        if self.buckets is None:
            return dict.fromkeys([match.name for match in direct], 0)
        if isinstance(self.buckets, Mapping):
            last = max(self.buckets.values(), default=0)
            return {match.name: self.buckets.get(match.source_name, last) for match in direct}
        # All pieces of a tensor are in the same bucket, so the tensor is complete after it.
        size_bytes: dict[str, int] = {}
        for match in direct:
            size_bytes[match.target_name] = size_bytes.get(match.target_name, 0) + count_bytes(
                match
            )
        # Buckets are larger than asked where there would be too many.
        limit_bytes = max(self.buckets, -(-sum(size_bytes.values()) // _MAX_BUCKETS))
        number_of = schedule.fill_batches(size_bytes, limit_bytes)
        return {match.name: number_of[match.target_name] for match in direct}

    @property
    def batch_count(self) -> int:
        """The number of batches, at least 1."""
        return max(self.batches, default=0) + 1

    @cached_property
    def complete_names(self) -> tuple[tuple[str, ...], ...]:
        """By batch, the target's tensors that are complete after it."""
        pairs = list(zip(self.batches, self.matches, strict=True))
        return list_complete_names(pairs, self.batch_count)

    def part(self, rank: int) -> RefitPart:
        """Return the share of a rank."""
        transfers = self.job.for_rank(rank).shared()
        changes = {item.name: item.change for item in self.job.items}
        handed_on: dict[str, tuple[Transfers, ...]] = {}
        when_whole: dict[str, tuple[Transfers, ...]] = {}
        if self.staged is not None:
            for item, stages in zip(self.staged.job.items, self.staged.for_rank(rank), strict=True):
                if item.name in changes:
                    # The tensor is exchanged in all other runs.
                    when_whole[item.name] = tuple(stages)
                elif any(map(len, stages)):
                    transfers[item.name], *others = stages
                    handed_on[item.name] = tuple(others)
            changes |= {item.name: item.change for item in self.staged.job.items}
        # A transform at the source creates all of its outputs in a single call.
        transformed = {
            m.made_of for m in self.matches if m.made_at == "source" and m.name in transfers
        }
        items = []
        spans, no_span = self.spans, schedule.PipelineSpan()
        for (match, chosen), batch in zip(self.moves, self.batches, strict=True):
            name = match.name
            moving = transfers.get(name)
            if (
                moving is None
                and match.made_of not in transformed
                and not any(map(len, when_whole.get(name, ())))
                and rank not in match.target.local_shapes
                and (chosen.program is None or rank not in chosen.program.source.mesh.devices)
            ):
                continue
            if moving is None:
                moving = Transfers.none(len(match.source.shape))
            change = changes.get(name) or LayoutChange(match.source, match.target)
            rest = handed_on.get(name, ()), when_whole.get(name, ()), spans.get(name, no_span)
            items.append(PartItem(match, change, moving, batch, chosen, *rest))
        # All batches share one arena, which must be as large as the fullest of them needs.
        filled_bytes = [0] * self.batch_count
        for number, (_, size_bytes) in self._staged_bytes.items():
            filled_bytes[self.batches[number]] += size_bytes
        buckets = max(self.bucket_of.values(), default=0) + 1
        return RefitPart(tuple(items), self.batch_count, max(filled_bytes), self.digest, buckets)

    def own_part(self, rank: int) -> RefitPart:
        """Return the share of a rank, and keep it; `part` computes it anew."""
        if rank not in self.known_parts:
            self.known_parts[rank] = self.part(rank)
        return self.known_parts[rank]


def list_complete_names(
    pairs: Sequence[tuple[int, Match]], batches: int
) -> tuple[tuple[str, ...], ...]:
    """Return by batch the targets that are complete after it, from pairs `(batch, match)`."""
    last: dict[str, int] = {}
    for batch, match in pairs:
        # A transformed tensor is complete after all of its inputs.
        for name in {match.target_name, match.made_of or match.target_name}:
            last[name] = max(last.get(name, 0), batch)
    names: list[list[str]] = [[] for _ in range(batches)]
    for name, batch in last.items():
        names[batch].append(name)
    return tuple(map(tuple, names))


def staging_limit_bytes(extra_bytes: int) -> int:
    """Return the part of a memory limit for staged elements; the rest is for messages."""
    return extra_bytes // 2 // schedule.ALIGNMENT_BYTES * schedule.ALIGNMENT_BYTES


def staging_bytes(match: Match, chosen: TensorMethod = BY_EXCHANGE) -> int:
    """Return the maximum memory of a rank between source and target of a tensor.

    A transform at the target stages sent and received elements. A transform at the source stages
    only sent elements, which are received in place. A program stages the shards between its steps.
    """
    itemsize = as_dtype(match.dtype).itemsize_bytes
    if chosen.program is not None:
        return between_bytes(chosen.program, itemsize)
    found_bytes = 0
    for layout in (match.source, match.target)[: 1 if match.made_at == "source" else 2]:
        elements = np.zeros(layout.slots, dtype=np.int64)
        # Sum over all cells of each rank.
        np.add.at(elements, layout.cell_slot, layout.cell_shape.prod(axis=1))
        found_bytes += schedule.align(int(elements.max(initial=0)) * itemsize)
    return found_bytes


def count_bytes(match: Match) -> int:
    """Return the size of a match's elements as they are sent."""
    return math.prod(match.target.shape) * as_dtype(match.dtype).itemsize_bytes


def _has_stages(chosen: TensorMethod) -> bool:
    return chosen.is_staged or chosen.is_staged_whole
