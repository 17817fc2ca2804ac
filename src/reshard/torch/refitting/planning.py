"""Planning of a refit: compare both models, and create the `plan` on all ranks or on the first.

*Local* planning: every rank gathers the manifests of all ranks, and plans its own part.
*Centralized* planning: only the group's first rank gathers them, plans all parts and sends each
rank its part. The parts are equal, and so is the error if models do not match: it is raised on
every rank. Centralized planning pays off for many slow ranks with large models; the first rank's
time and bytes then grow with the number of ranks (see `PlanningReport`).

A trainer prepares a refit for each engine, and most engines are alike. A plan follows from the
options and from all ranks' descriptions of their models, so a rank with a plan for the same inputs
reuses it. Each rank decides this by itself: ranks that plan anew find the same plan.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import ReshardError, ShardError
from reshard.system import peak_bytes
from reshard.text import first_lines
from reshard.topology import Topology
from reshard.torch.exchange.agreement import gather_all, scatter
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models import model_manifest
from reshard.torch.models.naming import find_entry
from reshard.torch.refitting.matching import Match, match_tensors
from reshard.torch.refitting.methods import choose_methods
from reshard.torch.refitting.options import RefitSettings
from reshard.torch.refitting.plan import RefitPart, RefitPlan, count_bytes, staging_limit_bytes
from reshard.torch.refitting.tied_sources import find_distant_pairs
from reshard.torch.refitting.transforms import Transform

_SHOWN = 20
# With "auto": the number of buckets, and the minimum bytes of a bucket, which take precedence.
_FEWEST_BUCKETS, _LEAST_BUCKET_BYTES = 16, 1 << 20
# Plans of this process by their inputs: all that are in use, and the last plan used. If the only
# engine leaves and another engine like it arrives, its plan is still there.
_PLANS: weakref.WeakValueDictionary[bytes, RefitPlan] = weakref.WeakValueDictionary()
_LAST: deque[RefitPlan] = deque(maxlen=1)


@dataclass(frozen=True, slots=True)
class PlanningReport:
    """The costs of a refit's preparation on this rank.

    Attributes:
        planning: `local` or `centralized`.
        gathered_bytes: the size of other ranks' manifests received.
        scattered_bytes: the size of all parts, on the rank that plans; on others, of its own part.
        planned_ranks: the number of ranks whose parts this rank computed, without parts that were
            reused.
        peak_memory_bytes: the increase of this process's peak memory during the preparation.
        planning_s: seconds, including those spent waiting for others.
        made_at_source: tensors with a part on this rank that transforms create before sending.
        made_at_target: tensors with a part on this rank that transforms create from received
            elements, and why.
        programs: tensors with a part on this rank that move by a program of collectives, with its
            steps and why.
        exchanged: tensors with a part on this rank that move in the exchange though programs were
            considered, and why.
        staged: tensors with a part on this rank that cross into each host once, and why.
    """

    planning: str
    gathered_bytes: int
    scattered_bytes: int
    planned_ranks: int
    peak_memory_bytes: int
    planning_s: float
    made_at_source: tuple[str, ...] = ()
    made_at_target: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    exchanged: Mapping[str, str] = field(default_factory=dict)
    staged: Mapping[str, str] = field(default_factory=dict)


def find_transforms(names: Iterable[str], settings: RefitSettings) -> dict[str, Transform]:
    """Return the transform of each tensor that has one of its own.

    A transform's further outputs have none.
    """
    transforms: dict[str, Transform] = {}
    outputs: set[str] = set()
    for name in names if settings.transforms else ():
        transform = find_entry(name, settings.transforms or {})
        if transform is not None and name not in outputs:
            transforms[name] = transform
            outputs.update(transform.outputs(name))
    return transforms


def plan_refit(
    settings: RefitSettings,
    hosts: Topology | None,
    before: Mapping[int, model_manifest.ModelManifest],
    after: Mapping[int, model_manifest.ModelManifest],
) -> RefitPlan:
    """Return the plan from all ranks' manifests of both models.

    Args:
        settings: the options, equal on every rank.
        hosts: those that the ranks reported, or None.
        before, after: of the source and the target, by rank.

    Raises ShardError with all mismatches.
    """
    # If a rank could not list its model, the missing tensors are not reported separately.
    unlisted = [
        f"rank {rank}: {problem}"
        for manifests in (before, after)
        for rank, manifest in manifests.items()
        for problem in manifest.problems
    ]
    _expect_none(unlisted)
    source, problems = model_manifest.assemble_tensors(before, "source")
    target, more = model_manifest.assemble_tensors(after, "target")
    problems += more
    # A tensor that ranks describe differently is reported once, and not also as missing.
    names_before, names_after = _names(before), _names(after)
    aliases = model_manifest.find_alias_names(after)
    unclear = names_before - source.keys(), names_after - target.keys() - aliases
    source = {name: tensor for name, tensor in source.items() if name not in unclear[1]}
    target = {name: tensor for name, tensor in target.items() if name not in unclear[0]}
    problems += [
        f"{name}: not in the target, but a transform is given for it"
        for name in settings.transforms or ()
        if "*" not in name and name not in names_after
    ]
    if isinstance(settings.cast, Mapping):
        unknown = settings.cast.keys() - names_before - names_after
        problems += [
            f"{name}: cast names it, but it is in neither model; give names common to both"
            for name in sorted(map(str, unknown))
        ]
    ties = settings.ties or {}
    made_by = find_transforms(target, settings)
    tied_names = model_manifest.find_tied_names(before)
    matches, more = match_tensors(
        source,
        target,
        ties,
        settings.cast,
        settings.strict,
        made_by,
        tied_names,
        settings.quantized,
    )
    problems += more
    _expect_none(problems)
    staging_bytes = staging_limit_bytes(settings.extra_bytes)
    methods = choose_methods(settings, hosts, matches, staging_bytes)
    return RefitPlan(
        tuple(matches),
        staging_bytes,
        methods,
        _limit_buckets(matches, settings),
        topology=settings.topology or hosts,
        tied=find_distant_pairs(
            ties,
            {name: (tensor.layout, tensor.dtype) for name, tensor in source.items()}
            if ties
            else {},
            {match.source_name for match in matches},
            tied_names,
        ),
    )


def _limit_buckets(
    matches: Sequence[Match], settings: RefitSettings
) -> int | Mapping[str, int] | None:
    if settings.buckets != "auto":
        return settings.buckets
    share_bytes = sum(map(count_bytes, matches)) // _FEWEST_BUCKETS
    return min(settings.extra_bytes, max(share_bytes, _LEAST_BUCKET_BYTES))


def _expect_none(problems: Sequence[str]) -> None:
    """Raise ShardError if there are problems, with the first of them."""
    if problems:
        raise ShardError(
            f"{len(problems)} thing{'s do' if len(problems) > 1 else ' does'} not fit; nothing "
            f"was written:{first_lines(problems, _SHOWN)}"
        )


def _names(manifests: Mapping[int, model_manifest.ModelManifest]) -> set[str]:
    listed = {id(names): names for names in (r.columns.names for r in manifests.values())}
    return set[str]().union(*listed.values())


def plan_part(
    settings: RefitSettings,
    hosts: Topology | None,
    before: model_manifest.ModelManifest,
    after: model_manifest.ModelManifest,
    group: RankGroup,
) -> tuple[RefitPart, PlanningReport, RefitPlan | None]:
    """Return this rank's part, a report of its planning, and the whole plan if known here."""
    begun_s, had_bytes = time.perf_counter(), peak_bytes()
    ranks = group.ranks
    planning = settings.planning
    is_central = planning == "centralized"
    is_first = group.rank == ranks[0]
    # 1. Gather the manifests of all ranks; with centralized planning, on the first rank only.
    # Names are separate from the rest: ranks with different parts of a tensor use the same names.
    (names, others), gathered_bytes = gather_all(
        model_manifest.write_manifests(before, after), group, to_first=is_central
    )
    messages = {rank: (names[rank], others[rank]) for rank in ranks}
    scattered_bytes = 0
    part: RefitPart | ReshardError
    parts: Any = None
    whole: RefitPlan | None = None
    is_known = False
    # 2. Plan: all ranks' parts, or each rank its own part.
    if is_first or not is_central:
        plan = reuse_plan(
            make_key(settings.plan_key(hosts), messages),
            lambda: plan_or_error(settings, hosts, messages),
        )
        if isinstance(plan, RefitPlan):
            is_known = group.rank in plan.known_parts
            whole = plan
        if not is_central:
            part = plan if isinstance(plan, ReshardError) else plan.own_part(group.rank)
        elif isinstance(plan, ReshardError):
            parts = (plan for _ in ranks)
        else:
            parts = map(plan.part, ranks)
    if is_central:
        part, scattered_bytes = scatter(parts, group)
    # 3. Raise after the collectives, so that no rank waits for a failed rank.
    if isinstance(part, ReshardError):
        raise part
    reasons = {
        where: {match.made_of: match.why for match in part.made if match.made_at == where}
        for where in ("source", "target")
    }
    programs, exchanged, staged = _report_methods(part)
    report = PlanningReport(
        planning,
        gathered_bytes,
        scattered_bytes,
        len(ranks) * is_first if is_central else int(not is_known),
        peak_bytes() - had_bytes,
        time.perf_counter() - begun_s,
        tuple(reasons["source"]),
        reasons["target"],
        programs,
        exchanged,
        staged,
    )
    return part, report, whole


def plan_or_error(
    settings: RefitSettings, hosts: Topology | None, messages: Mapping[int, tuple[bytes, bytes]]
) -> RefitPlan | ReshardError:
    """Return the plan of both models as all ranks describe them, or the error.

    The error is returned, not raised, so that every rank that waits for the plan receives it.
    """
    try:
        manifests = model_manifest.read_manifests(messages)
        plan = plan_refit(
            settings,
            hosts,
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


def _report_methods(part: RefitPart) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the reasons for programs, for the exchange and for stages, by tensor."""
    programs: dict[str, str] = {}
    exchanged: dict[str, str] = {}
    staged: dict[str, str] = {}
    for item in part.items:
        name, method = item.match.name, item.chosen
        if method.program is not None:
            steps = ", ".join(map(str, method.program.steps))
            programs[name] = f"{steps}: {method.why}"
        elif method.is_staged or method.is_staged_whole:
            staged[name] = method.why
        elif method.why:
            exchanged[name] = method.why
    return programs, exchanged, staged


def reuse_plan(
    key: bytes | None, plan: Callable[[], RefitPlan | ReshardError]
) -> RefitPlan | ReshardError:
    """Return the kept plan of a key, or plan and keep the result; with None, plan anew."""
    if key is None:
        return plan()
    result = _PLANS.get(key) or plan()
    if isinstance(result, RefitPlan):
        _PLANS[key] = result
        _LAST.append(result)
    return result


def make_key(options: object | None, messages: Mapping[int, tuple[bytes, ...]]) -> bytes | None:
    """Return a digest of a plan's inputs: options and all ranks' messages; None without options.

    >>> make_key((True, 3), {0: (b"a",)}) == make_key((True, 3), {0: (b"b",)}), make_key(None, {})
    (False, None)
    """
    if options is None:
        return None
    hasher = hashlib.blake2b(repr(options).encode(), digest_size=16)
    # Ranks with equal messages share an object, so each is hashed once.
    distinct = {id(part): part for message in messages.values() for part in message}
    digests = {
        key: hashlib.blake2b(part, digest_size=16).digest() for key, part in distinct.items()
    }
    for rank, message in messages.items():
        hasher.update(f"\0{rank}\0".encode() + b"".join(digests[id(part)] for part in message))
    return hasher.digest()
