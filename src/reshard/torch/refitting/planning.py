"""Planning of a refit: compare both models, and create the `plan` on all ranks or on the first.

*Local* planning: every rank gathers the manifests of all ranks, and plans its own part.
*Centralized* planning: only the group's first rank gathers them, plans all parts and sends each
rank its part. The parts are equal, and so is the error if models do not match: it is raised on
every rank. Centralized planning pays off for many slow ranks with large models; the first rank's
time and bytes then grow with the number of ranks (see `PlanningReport`).
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
# The maximum bytes of a bucket, or the bucket of each source tensor; a single bucket when None.
Buckets = int | Literal["auto"] | Mapping[str, int] | None
_SHOWN = 20
# With "auto": the number of buckets, and the minimum bytes of a bucket, which take precedence.
_FEWEST_BUCKETS, _LEAST_BUCKET_BYTES = 16, 1 << 20
# The plans of this process, for reuse.
_KNOWN: KnownPlans[RefitPlan] = KnownPlans()


@dataclass(frozen=True, slots=True)
class RefitPlanner:
    """The comparison of both models, with options that are equal on every rank."""

    ties: Mapping[str, str]
    cast: CastOption
    strict: bool
    transforms: Mapping[str, Transform]
    extra_bytes: int
    methods: RefitMethods = field(default_factory=RefitMethods)
    buckets: Buckets = None
    quantized: BlockQuantized | None = None

    def transforms_made(self, names: Iterable[str]) -> dict[str, Transform]:
        """Return the transforms of transformed tensors; the default is quantization, if given."""
        found, quantized = self.transforms_of(names), self.quantized
        return {name: found.get(name, quantized) for name in names} if quantized else found

    def transforms_of(self, names: Iterable[str]) -> dict[str, Transform]:
        """Return the transform of each tensor. A transform's further outputs have none."""
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
        """The options that determine the plan; None with transforms, which are code."""
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
        """Return the plan. Raises ShardError with all mismatches."""
        # If a rank could not list its model, the missing tensors are not reported separately.
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
        # A tensor that ranks describe differently is reported once, and not also as missing.
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
    """Raise ShardError if there are problems, with the first of them."""
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
    """Return this rank's part, a report of its planning, and the whole plan if known here."""
    begun_s, had_bytes = time.perf_counter(), peak_memory_bytes()
    ranks = group.ranks
    is_central = planning == "centralized"
    is_first = group.rank == ranks[0]
    # 1. Gather the manifests of all ranks; with centralized planning, on the first rank only.
    # Names are separate from the rest: ranks with different parts of a tensor use the same names.
    names, others = (
        gather(message, group, to_first=is_central) for message in write_manifests(before, after)
    )
    messages = {rank: (names.values[rank], others.values[rank]) for rank in ranks}
    scattered_bytes = 0
    part: RefitPart | ReshardError
    parts: Any = None
    whole: RefitPlan | None = None
    is_known = False
    # 2. Plan: all ranks' parts, or each rank its own part.
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
    # 3. Raise after the collectives, so that no rank waits for a failed rank.
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
    """Return the plan of both models as all ranks describe them, or the error.

    The error is returned, not raised, so that every rank that waits for the plan receives it.
    """
    try:
        manifests = read_manifests(messages)
        plan = matching.plan(
            {rank: before for rank, (before, _) in manifests.items()},
            {rank: after for rank, (_, after) in manifests.items()},
        )
        # Compute these now, so that errors occur here and not later on a single rank.
        plan.job.assignment, plan.batches, plan.spans  # noqa: B018
    except ReshardError as error:
        return error
    except Exception as error:
        # Any error of a user's transform is returned, since the other ranks wait for this rank.
        return ShardError(f"nothing was written: {type(error).__name__}: {error}")
    return plan
