"""Planning of a refit: models are compared, and the `plan` is made on every rank or on one.

*Local* planning: every rank learns what all others have, and plans its own part. *Centralized*:
only the group's first rank learns it, plans all parts and gives each rank its own. The parts are
the same, and so is the error where models do not fit: on every rank. Centralized planning is worth
it where ranks are many and slow and their models large; the first rank's time and bytes then grow
with the number of ranks, as `PlanningReport` says.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reshard.errors import ReshardError, ShardError
from reshard.torch.exchange.agreement import gather, scatter
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.manifest_documents import read_manifests, write_manifests
from reshard.torch.models.model_manifest import (
    ModelManifest,
    assemble_tensors,
    find_alias_names,
    find_tied_names,
)
from reshard.torch.models.naming import find_entry
from reshard.torch.refitting.matching import CastOption, Match, match_tensors
from reshard.torch.refitting.methods import RefitMethods
from reshard.torch.refitting.plan import RefitPart, RefitPlan, count_bytes, staging_limit_bytes
from reshard.torch.refitting.preparation import KnownPlans, make_key
from reshard.torch.refitting.report import PlanningReport, peak_memory_bytes
from reshard.torch.refitting.tied_sources import find_distant_pairs
from reshard.torch.refitting.transforms import BlockQuantized, Transform

Planning = Literal["local", "centralized"]
# The most bytes of a bucket, or which one each tensor of the source is in; one for all when None.
Buckets = int | Literal["auto"] | Mapping[str, int] | None
_SHOWN = 20
# How many buckets there are at least where they are not told, unless they are too small for it.
_FEWEST_BUCKETS, _LEAST_BUCKET_BYTES = 16, 1 << 20
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
        for name in names if self.transforms else ():
            transform = find_entry(name, self.transforms)
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

    def plan(
        self, before: Mapping[int, ModelManifest], after: Mapping[int, ModelManifest]
    ) -> RefitPlan:
        """The tensors to move. Raises ShardError with all that does not fit."""
        # A model that a rank could not list lacks tensors, which are no problems of their own.
        unlisted = [
            f"rank {rank}: {problem}"
            for manifests in (before, after)
            for rank, manifest in manifests.items()
            for problem in manifest.problems
        ]
        _expect_none(unlisted)
        source, problems = assemble_tensors(before, "source")
        target, more = assemble_tensors(after, "target")
        problems += more
        # What a side has, but ranks describe differently, is reported once, and not as missing too.
        aliases = find_alias_names(after)
        unclear = _names(before) - source.keys(), _names(after) - target.keys() - aliases
        source = {name: tensor for name, tensor in source.items() if name not in unclear[1]}
        target = {name: tensor for name, tensor in target.items() if name not in unclear[0]}
        problems += [
            f"{name}: not in the target, but a transform is given for it"
            for name in self.transforms
            if "*" not in name and name not in _names(after)
        ]
        if isinstance(self.cast, Mapping):
            unknown = self.cast.keys() - (_names(before) | _names(after))
            problems += [
                f"{name}: cast names it, but it is in neither model; give names common to both"
                for name in sorted(map(str, unknown))
            ]
        made_by = self.transforms_of(target)
        one = find_tied_names(before)
        matches, more = match_tensors(
            source, target, self.ties, self.cast, self.strict, made_by, one, self.quantized
        )
        problems += more
        _expect_none(problems)
        staging_bytes = staging_limit_bytes(self.extra_bytes)
        methods = self.methods.of(matches, staging_bytes)
        return RefitPlan(
            tuple(matches),
            staging_bytes,
            methods,
            self._limit_buckets(matches),
            topology=self.methods.stage_topology,
            tied=find_distant_pairs(
                self.ties,
                {name: (tensor.layout, tensor.dtype) for name, tensor in source.items()}
                if self.ties
                else {},
                {match.source_name for match in matches},
                one,
            ),
        )

    def _limit_buckets(self, matches: Sequence[Match]) -> int | Mapping[str, int] | None:
        if self.buckets != "auto":
            return self.buckets
        share_bytes = sum(map(count_bytes, matches)) // _FEWEST_BUCKETS
        return min(self.extra_bytes, max(share_bytes, _LEAST_BUCKET_BYTES))


def _expect_none(problems: Sequence[str]) -> None:
    """Raise ShardError where there are problems, with the first of them."""
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        rest = len(problems) - _SHOWN
        raise ShardError(
            f"{len(problems)} thing{'s do' if len(problems) > 1 else ' does'} not fit; nothing "
            f"was written:\n  {shown}" + (f"\n  ... {rest} more" if rest > 0 else "")
        )


def _names(manifests: Mapping[int, ModelManifest]) -> set[str]:
    listed = {id(names): names for names in (r.columns.names for r in manifests.values())}
    return set[str]().union(*listed.values())


def plan_part(
    matching: RefitPlanner,
    before: ModelManifest,
    after: ModelManifest,
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
        gather(message, group, to_first=is_central) for message in write_manifests(before, after)
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
        where: {match.made_of: match.why for match in part.made if match.made_at == where}
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
        *part.methods,
    )
    return part, report, whole


def plan_or_error(
    matching: RefitPlanner, messages: Mapping[int, tuple[bytes, bytes]]
) -> RefitPlan | ReshardError:
    """The plan of both models as all ranks say they are, or why there is none.

    Every rank that waits for it learns that.
    """
    try:
        manifests = read_manifests(messages)
        plan = matching.plan(
            {rank: before for rank, (before, _) in manifests.items()},
            {rank: after for rank, (_, after) in manifests.items()},
        )
        # What can be wrong with a plan is wrong now, not for one rank later.
        plan.job.assignment, plan.batches, plan.spans  # noqa: B018
    except ReshardError as error:
        return error
    except Exception as error:
        # A transform of the user's: the other ranks wait for this.
        return ShardError(f"nothing was written: {type(error).__name__}: {error}")
    return plan
