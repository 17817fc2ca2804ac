"""Planning of a refit: the tensors to move, the share of each rank, and which rank plans it.

A `RefitPlan` is the whole: the tensors that match, as one job. A `RefitPart` is one rank's share.

*Local* planning: every rank learns what all others have, and plans its own part. *Centralized*:
only the group's first rank learns it, plans all parts and gives each rank its own. The parts are
the same, and so is the error where models do not fit: on every rank. Centralized planning is worth
it where ranks are many and slow and their models large; the first rank's time and bytes then grow
with the number of ranks, as `PlanningReport` says.

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
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, ShardError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.hosts.pipeline import PipelineSpan, divide_pipelines
from reshard.plans.hosts.staged_job import StagedJob
from reshard.plans.job import Job
from reshard.plans.schedule.messages import ALIGNMENT_BYTES, align, fill_batches
from reshard.topology import Topology
from reshard.torch.exchange.agreement import gather, scatter
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.naming import fitting
from reshard.torch.models.roster_documents import read_rosters, write_rosters
from reshard.torch.models.rosters import Roster, alias_names, assemble, one_tensor_names
from reshard.torch.programs.methods import method_digest
from reshard.torch.programs.phases import between_bytes
from reshard.torch.refitting.matching import CastOption, Match, match_tensors
from reshard.torch.refitting.methods import BY_EXCHANGE, RefitMethods, TensorMethod, job_of
from reshard.torch.refitting.preparation import KnownPlans, make_key
from reshard.torch.refitting.report import PlanningReport, peak_memory_bytes, report_methods
from reshard.torch.refitting.transforms import BlockQuantized, Transform

Planning = Literal["local", "centralized"]
# The most bytes of a bucket, or which one each tensor of the source is in; one for all when None.
Buckets = int | Literal["auto"] | Mapping[str, int] | None
_SHOWN = 20
# How many buckets there are at least where they are not told, unless they are smaller than worth
# it; and the most, since each has messages of its own.
_FEWEST_BUCKETS, _LEAST_BUCKET_BYTES, _MOST_BUCKETS = 16, 1 << 20, 256


@dataclass(frozen=True, slots=True, eq=False)
class PartItem:
    """One tensor on one rank: what it sends, keeps and receives of it, and in which batch.

    What moves by a program has no transfers of its own. What is staged is also
    `handed_on`, in the stages behind the first; `span` is its place in the pipeline.
    """

    match: Match
    change: LayoutChange
    transfers: Transfers
    batch: int
    chosen: TensorMethod = BY_EXCHANGE
    handed_on: tuple[Transfers, ...] = ()
    span: PipelineSpan = field(default_factory=PipelineSpan)

    @property
    def is_direct(self) -> bool:
        """Whether it travels at once, from where the source has it."""
        return not (self.match.made_at or self.handed_on or self.chosen.program)

    @property
    def stages(self) -> tuple[tuple[LayoutChange, Transfers], ...]:
        """Its transfers stage by stage, each with the change of layouts that they are of."""
        within = LayoutChange(self.change.target, self.change.target)
        return ((self.change, self.transfers), *((within, rows) for rows in self.handed_on))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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

    Raises UsageError where a tensor that is transformed needs more than `staging_bytes`.
    """

    matches: tuple[Match, ...]
    staging_bytes: int
    methods: tuple[TensorMethod, ...] = ()
    buckets: int | Mapping[str, int] | None = None
    known_parts: dict[int, RefitPart] = field(default_factory=dict, compare=False, repr=False)
    topology: Topology | None = None

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
        matches = [match for match, chosen in self.moves if chosen.is_staged]
        if not matches or self.topology is None:
            return None
        return StagedJob(job_of(matches), self.topology)

    @cached_property
    def spans(self) -> dict[str, PipelineSpan]:
        """The place of each staged tensor in the pipeline of its batch."""
        sizes: dict[int, dict[str, int]] = {}
        for (match, chosen), batch in zip(self.moves, self.batches, strict=True):
            if chosen.is_staged:
                sizes.setdefault(batch, {})[match.name] = _count_bytes(match)
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
        for one, chosen in self.moves:
            if _needs_memory(one, chosen):
                name = one.made_of or one.name
                needed_bytes[name] = needed_bytes.get(name, 0) + staging_bytes(one, chosen)
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
        return tuple(
            buckets + batch_of[one.made_of or one.name]
            if _needs_memory(one, chosen)
            else self.bucket_of[one.name]
            for one, chosen in self.moves
        )

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """The bucket of every match that goes straight into the target."""
        direct = [one for one, chosen in self.moves if not _needs_memory(one, chosen)]
        if isinstance(self.buckets, Mapping):
            last = max(self.buckets.values(), default=0)
            return {one.name: self.buckets.get(one.source_name, last) for one in direct}
        # All pieces of a tensor are in one bucket, so that it is complete with that.
        size_bytes: dict[str, int] = {}
        for one in direct:
            size_bytes[one.target_name] = size_bytes.get(one.target_name, 0) + _count_bytes(one)
        total_bytes = sum(size_bytes.values())
        limit_bytes = self.buckets
        if limit_bytes is None:
            limit_bytes = total_bytes
        limit_bytes = max(limit_bytes, -(-total_bytes // _MOST_BUCKETS))
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
        if self.staged is not None:
            parts = zip(self.staged.job.items, self.staged.for_rank(rank), strict=True)
            found = {item.name: stages for item, stages in parts if any(map(len, stages))}
            transfers = {**transfers, **{name: stages[0] for name, stages in found.items()}}
            handed_on = {name: tuple(stages[1:]) for name, stages in found.items()}
            changes |= {item.name: item.change for item in self.staged.job.items}
        # What one transform makes at the source, it makes together.
        made = {m.made_of for m in self.matches if m.made_at == "source" and m.name in transfers}
        items = [
            PartItem(
                one,
                changes.get(one.name) or LayoutChange(one.source, one.target),
                transfers.get(one.name) or Transfers.none(len(one.source.shape)),
                batch,
                chosen,
                handed_on.get(one.name, ()),
                self.spans.get(one.name, PipelineSpan()),
            )
            for (one, chosen), batch in zip(self.moves, self.batches, strict=True)
            if one.name in transfers
            or one.made_of in made
            or rank in one.target.local_shapes
            or (chosen.program is not None and rank in chosen.program.source.mesh.devices)
        ]
        # All batches share one arena, which must be as large as the fullest of them needs.
        filled_bytes = [0] * self.batch_count
        for (one, chosen), batch in zip(self.moves, self.batches, strict=True):
            filled_bytes[batch] += staging_bytes(one, chosen) if _needs_memory(one, chosen) else 0
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


def _count_bytes(match: Match) -> int:
    """Of its elements, as they travel."""
    return math.prod(match.target.shape) * as_dtype(match.dtype).itemsize_bytes


def _needs_memory(match: Match, chosen: TensorMethod) -> bool:
    return match.is_transformed or (chosen.program is not None and staging_bytes(match, chosen) > 0)


# What this process has planned.
_KNOWN: KnownPlans[RefitPlan] = KnownPlans()


@dataclass(frozen=True, slots=True)
class RefitPlanner:
    """How both models are compared: the same on every rank."""

    ties: Mapping[str, str]
    cast: CastOption
    strict: bool
    transforms: Mapping[str, Transform]
    extra_bytes: int
    methods: RefitMethods = field(default_factory=RefitMethods)
    buckets: Buckets = None
    quantized: BlockQuantized | None = None

    def transforms_made(self, names: Iterable[str]) -> dict[str, Transform]:
        """Those of tensors that are known to be made by one; where none is given, quantised."""
        found, quantized = self.transforms_of(names), self.quantized
        return {name: found.get(name, quantized) for name in names} if quantized else found

    def transforms_of(self, names: Iterable[str]) -> dict[str, Transform]:
        """The transform of every tensor that one is given for; what it makes besides has none."""
        found: dict[str, Transform] = {}
        made: set[str] = set()
        for name in names:
            transform = fitting(name, self.transforms)
            if transform is not None and name not in made:
                found[name] = transform
                made.update(transform.outputs(name))
        return found

    @property
    def options(self) -> tuple[object, ...] | None:
        """All that says how models are compared; None with transforms, which are code."""
        tables = (
            list(given.items()) if isinstance(given, Mapping) else given
            for given in (self.ties, self.cast, self.buckets)
        )
        methods = self.methods
        hosts = [one and one.interning_key() for one in (methods.topology, methods.hosts)]
        how = methods.method, methods.changed_only
        others = self.strict, self.extra_bytes, how, hosts, repr(self.quantized)
        return None if self.transforms else (*tables, *others)

    def plan(self, before: Mapping[int, Roster], after: Mapping[int, Roster]) -> RefitPlan:
        """The tensors to move. Raises ShardError with all that does not fit."""
        source, problems = assemble(before, "source")
        target, more = assemble(after, "target")
        problems += more
        # What a side has, but ranks describe differently, is reported once, and not as missing too.
        aliases = alias_names(after)
        unclear = _names(before) - source.keys(), _names(after) - target.keys() - aliases
        source = {name: tensor for name, tensor in source.items() if name not in unclear[1]}
        target = {name: tensor for name, tensor in target.items() if name not in unclear[0]}
        problems += [
            f"{name}: not in the target, but a transform is given for it"
            for name in self.transforms
            if "*" not in name and name not in _names(after)
        ]
        made_by = self.transforms_of(target)
        one = one_tensor_names(before)
        matches, more = match_tensors(
            source, target, self.ties, self.cast, self.strict, made_by, one, self.quantized
        )
        problems += more
        if problems:
            shown = "\n  ".join(problems[:_SHOWN])
            rest = len(problems) - _SHOWN
            raise ShardError(
                f"{len(problems)} thing{'s do' if len(problems) > 1 else ' does'} not fit; nothing "
                f"was written:\n  {shown}" + (f"\n  ... {rest} more" if rest > 0 else "")
            )
        staging_bytes = staging_limit_bytes(self.extra_bytes)
        methods = self.methods.of(matches, staging_bytes)
        return RefitPlan(
            tuple(matches),
            staging_bytes,
            methods,
            self._limit_buckets(matches),
            topology=self.methods.stage_topology,
        )

    def _limit_buckets(self, matches: Sequence[Match]) -> int | Mapping[str, int] | None:
        if self.buckets != "auto":
            return self.buckets
        share_bytes = sum(map(_count_bytes, matches)) // _FEWEST_BUCKETS
        return min(self.extra_bytes, max(share_bytes, _LEAST_BUCKET_BYTES))


def _names(rosters: Mapping[int, Roster]) -> set[str]:
    listed = {id(names): names for names in (r.columns.names for r in rosters.values())}
    return set[str]().union(*listed.values())


def plan_part(
    matching: RefitPlanner,
    before: Roster,
    after: Roster,
    planning: Planning,
    group: RankGroup,
) -> tuple[RefitPart, PlanningReport, RefitPlan | None]:
    """This rank's part, what finding it took, and the whole plan where this rank has it."""
    begun_s, had_bytes = time.perf_counter(), peak_memory_bytes()
    ranks = group.ranks
    is_central = planning == "centralized"
    is_first = group.rank == ranks[0]
    # 1. Learn what all ranks have; where one rank plans for all, only that one does.
    # Names and all else apart: ranks that have other parts of a tensor call it by the same name.
    names, others = (
        gather(message, group, to_first=is_central) for message in write_rosters(before, after)
    )
    messages = {rank: (names.values[rank], others.values[rank]) for rank in ranks}
    scattered_bytes = 0
    part: RefitPart | ReshardError
    parts: Any = None
    whole: RefitPlan | None = None
    is_known = False
    # 2. Plan: for all ranks, or each rank its own part.
    if is_first or not is_central:
        key = make_key(matching.options, messages)
        found = _KNOWN.find(key) or plan_or_error(matching, messages)
        if isinstance(found, RefitPlan):
            _KNOWN.keep(key, found)
            is_known = group.rank in found.known_parts
        whole = found if isinstance(found, RefitPlan) else None
        if not is_central:
            part = found if isinstance(found, ReshardError) else found.own_part(group.rank)
        elif isinstance(found, ReshardError):
            parts = (found for _ in ranks)
        else:
            parts = found.parts(ranks)
    if is_central:
        part, scattered_bytes = scatter(parts, group)
    # 3. Raised behind the collectives, so that no rank waits for one that failed.
    if isinstance(part, ReshardError):
        raise part
    made = {
        where: {
            one.match.made_of: one.match.why for one in part.items if one.match.made_at == where
        }
        for where in ("source", "target")
    }
    report = PlanningReport(
        planning,
        names.received_bytes + others.received_bytes,
        scattered_bytes,
        len(ranks) * is_first if is_central else int(not is_known),
        peak_memory_bytes() - had_bytes,
        time.perf_counter() - begun_s,
        tuple(made["source"]),
        made["target"],
        *report_methods((one.match.name, one.chosen) for one in part.items),
    )
    return part, report, whole


def plan_or_error(
    matching: RefitPlanner, messages: Mapping[int, tuple[bytes, bytes]]
) -> RefitPlan | ReshardError:
    """The plan of both models as all ranks say they are, or why there is none.

    Every rank that waits for it learns that.
    """
    try:
        rosters = read_rosters(messages)
        plan = matching.plan(
            {rank: before for rank, (before, _) in rosters.items()},
            {rank: after for rank, (_, after) in rosters.items()},
        )
        # What can be wrong with a plan is wrong now, not for one rank later.
        plan.job.assignment, plan.batches, plan.spans  # noqa: B018
    except ReshardError as error:
        return error
    except Exception as error:
        # A transform of the user's: the other ranks wait for this.
        return ShardError(f"nothing was written: {type(error).__name__}: {error}")
    return plan
