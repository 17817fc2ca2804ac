"""How does a model in one layout fill another, between the ranks of a running job, again and again?

A trainer's weights move into the inference engine's, in place:

1. every rank lists what it has of both models (`parameters`), and learns what the others have
   (`metadata`, `rosters`);
2. names, shapes and types are compared (`matching`); all that does not fit is one error, on
   every rank, before anything is written;
3. the tensors are one job; each rank has its part of it (`refit_plan`), and prepares its messages
   (`exchange`) once;
4. a run sends and receives. All ranks confirm its end: where one fails, all raise, and the
   target counts as not usable.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, RunError, ShardError, UsageError
from reshard.torch.agreement import Intent, agree, confirm, device_of
from reshard.torch.exchange import DEFAULT_EXTRA_BYTES, Exchange, complete_contributions
from reshard.torch.matching import Cast, match
from reshard.torch.messages import Movement
from reshard.torch.metadata import gather, scatter
from reshard.torch.naming import Naming
from reshard.torch.parameters import Listing, Model, list_tensors, overlapping
from reshard.torch.refit_plan import RefitPart, RefitPlan
from reshard.torch.rosters import Roster, assemble

Planning = Literal["local", "centralized"]
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class PlanningReport:
    """What the preparation of a refit took on this rank.

    Attributes:
        planning: `local` or `centralized`.
        gathered_bytes: received of what other ranks have.
        scattered_bytes: parts given out, on the rank that plans; on others, that of its own part.
        planned_ranks: how many ranks' parts this rank worked out.
        peak_memory_bytes: by how much the most memory this process ever had grew meanwhile.
        planning_s: seconds, waiting for others included.
    """

    planning: str
    gathered_bytes: int
    scattered_bytes: int
    planned_ranks: int
    peak_memory_bytes: int
    planning_s: float


class Refit:
    """A refit that is prepared, and runs as often as wanted. Make it with `Refit.prepare`.

    `tensors`, `sent_bytes`, `received_bytes` and `extra_bytes` (memory beyond both models) are
    this rank's; `report` is of the preparation. `is_usable` says whether the target has the values
    of one run, and none of another.
    """

    def __init__(self, prepared: _Prepared, group: dist.ProcessGroup | None) -> None:
        self._prepared = prepared
        self._group = group
        self._stages = _stages(prepared, group)
        self._runs = 0
        self.report = prepared.report
        self.is_usable = True
        self.tensors = len(prepared.part.items)
        exchanges = [stage.exchange for stage in self._stages]
        self.sent_bytes = sum(exchange.sent_bytes for exchange in exchanges)
        self.received_bytes = sum(exchange.received_bytes for exchange in exchanges)
        self.extra_bytes = sum(exchange.extra_bytes for exchange in exchanges)

    @classmethod
    def prepare(
        cls,
        source: Model,
        target: Model,
        *,
        source_names: Naming | None = None,
        target_names: Naming | None = None,
        ties: Mapping[str, str] | None = None,
        stacks: Mapping[str, str] | None = None,
        cast: Cast = False,
        strict: bool = True,
        source_offset: int = 0,
        target_offset: int = 0,
        planning: Planning = "local",
        extra_bytes: int = DEFAULT_EXTRA_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> Refit:
        """Compare both models, plan, and prepare what every run needs. Nothing is written yet.

        All ranks of `group` call this.

        Args:
            source: the model that has the values, as this rank has it; see
                `reshard.torch.parameters`. None where it has nothing of it.
            target: likewise the model to fill.
            source_names, target_names: what each side's names are in names common to both, by
                function or table (`reshard.torch.naming`). Each rank gives its own.
            ties: names that mean the same tensor as another name.
            stacks: patterns of stacked tensors with those of their members, such as
                `{"*.experts.up": "*.experts.{}.up"}`, in common names; on either side.
            cast: whether a target may have another type than its source, for all or by name;
                or the type that it has then. The narrower of both travels.
            strict: whether a source that fills nothing is an error. A target without a source
                always is.
            source_offset, target_offset: the global rank of the rank that layouts given with
                tensors, or Megatron's ranks, call 0. DTensors have global ranks already.
            planning: whether every rank plans its own part, or the group's first rank plans all.
            extra_bytes: the most memory beyond both models, on each rank.
            group: of all ranks that have a part of either; all ranks when None.

        Raises:
            ShardError: on every rank, all names, shapes and types that do not fit.
            PlanError, RunError: on every rank, ranks that mean different things or cannot.
            UsageError: a rank that is none of the group's.
        """
        if dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the group; it does not call this")
        options = {
            "planning": planning,
            "extra_bytes": extra_bytes,
            "ties": ties,
            "stacks": stacks,
            "cast": cast,
            "strict": strict,
        }
        problem = None if planning in ("local", "centralized") else f"planning={planning!r}"
        agree(Intent({k: repr(v).encode() for k, v in options.items()}, problem), group)
        before = list_tensors(source, source_names, stacks, source_offset)
        after = list_tensors(target, target_names, stacks, target_offset)
        _check_memory(before, after)
        matching = _Matching(ties, cast, strict, extra_bytes)
        part, report = _planned(matching, before.roster, after.roster, planning, group)
        return cls(_agreed(part, before, after, extra_bytes, report, group), group)

    def run(self) -> None:
        """Fill the target with what the source has now. All ranks of the group call this.

        Raises:
            RunError: on every rank, one that fails or does not answer in the group's timeout.
                Where that is after the first byte, the target is not usable.
            PlanError: on every rank, ranks that run different refits.
        """
        agree(Intent({"refit": self._prepared.part.digest.encode()}, self._problem()), self._group)
        self.is_usable = False
        try:
            for stage in self._stages:
                stage.run()
            confirm(self._group)
        except BaseException as error:
            if isinstance(error, ReshardError):
                raise RunError(
                    f"{error}; the target is partly new and partly old, and not usable"
                ) from error
            raise
        for tensor in self._prepared.after.tensors.values():
            # Messages are written behind autograd's back.
            torch.autograd.graph.increment_version(tensor)
        self.is_usable = True
        self._runs += 1

    def _problem(self) -> str | None:
        """Why this rank cannot run; None where it can."""
        if not self.is_usable:
            return (
                "an earlier run failed, and messages of it may still be on their way; call "
                "renew(group) with a new process group"
            )
        for side in (self._prepared.before, self._prepared.after):
            for name, address in side.moved():
                return f"{name} is at another address than when it was prepared ({address:#x})"
        return None

    def renew(self, group: dist.ProcessGroup | None) -> None:
        """Prepare messages anew over another group of the same ranks, after a run that failed."""
        self._group = group
        self._stages = _stages(self._prepared, group)
        self.is_usable = True


def refit(source: Model, target: Model, **options: Any) -> Refit:
    """Fill a model from another, once. The result can run again.

    Takes and raises what `Refit.prepare` and `Refit.run` do.
    """
    prepared = Refit.prepare(source, target, **options)
    prepared.run()
    return prepared


@dataclass(frozen=True, slots=True)
class _Matching:
    """How both models are compared: the same on every rank."""

    ties: Mapping[str, str] | None
    cast: Cast
    strict: bool
    extra_bytes: int

    def plan(self, before: Mapping[int, Roster], after: Mapping[int, Roster]) -> RefitPlan:
        """The tensors to move. Raises ShardError with all that does not fit."""
        source, problems = assemble(before, "source")
        target, more = assemble(after, "target")
        problems += more
        matches, more = match(source, target, ties=self.ties, cast=self.cast, strict=self.strict)
        problems += more
        if problems:
            shown = "\n  ".join(problems[:_SHOWN])
            rest = len(problems) - _SHOWN
            raise ShardError(
                f"{len(problems)} thing{'s do' if len(problems) > 1 else ' does'} not fit; nothing "
                f"was written:\n  {shown}" + (f"\n  ... {rest} more" if rest > 0 else "")
            )
        return RefitPlan(tuple(matches), self.extra_bytes // 2)


def _planned(
    matching: _Matching,
    before: Roster,
    after: Roster,
    planning: Planning,
    group: dist.ProcessGroup | None,
) -> tuple[RefitPart, PlanningReport]:
    """This rank's part, and what finding it took."""
    begun_s, had_bytes = time.perf_counter(), _peak_memory_bytes()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    is_central = planning == "centralized"
    is_first = dist.get_rank() == ranks[0]
    gathered = gather((before, after), group, to_first=is_central)
    scattered_bytes = 0
    part: RefitPart | ReshardError
    parts: Any = None
    if is_first or not is_central:
        found = _plan_or_error(matching, gathered.values)
        if not is_central:
            part = found if isinstance(found, ReshardError) else found.part(dist.get_rank())
        elif isinstance(found, ReshardError):
            parts = (found for _ in ranks)
        else:
            parts = found.parts(ranks)
    if is_central:
        part, scattered_bytes = scatter(parts, group)
    if isinstance(part, ReshardError):
        raise part
    report = PlanningReport(
        planning,
        gathered.received_bytes,
        scattered_bytes,
        len(ranks) * is_first if is_central else 1,
        _peak_memory_bytes() - had_bytes,
        time.perf_counter() - begun_s,
    )
    return part, report


def _plan_or_error(
    matching: _Matching, rosters: Mapping[int, tuple[Roster, Roster]]
) -> RefitPlan | ReshardError:
    try:
        plan = matching.plan(
            {rank: before for rank, (before, _) in rosters.items()},
            {rank: after for rank, (_, after) in rosters.items()},
        )
        # What can be wrong with a plan is wrong now, not for one rank later.
        plan.job.line, plan.batches  # noqa: B018
    except ReshardError as error:
        return error
    return plan


def _peak_memory_bytes() -> int:
    """The most memory this process ever had; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check_memory(before: Listing, after: Listing) -> None:
    shared = overlapping(before.locals, after.locals)
    if shared:
        problem = f"{shared} share memory; a target must not lie where a source is"
        after.roster = Roster((), problems=(*after.roster.problems, problem))


@dataclass(slots=True)
class _Prepared:
    part: RefitPart
    before: Listing
    after: Listing
    device: torch.device
    extra_bytes: int
    report: PlanningReport


def _agreed(
    part: RefitPart,
    before: Listing,
    after: Listing,
    extra_bytes: int,
    report: PlanningReport,
    group: dist.ProcessGroup | None,
) -> _Prepared:
    """All ranks mean the same job, and each has its memory in one place."""
    devices = {t.device for side in (before, after) for t in side.locals.values()}
    problem = None
    if len(devices) > 1:
        problem = f"tensors on {sorted(map(str, devices))}; a rank has all of them on one device"
    agree(Intent({"refit": part.digest.encode()}, problem), group)
    device = devices.pop() if devices else device_of(group)
    return _Prepared(part, before, after, device, extra_bytes, report)


@dataclass(slots=True)
class _Stage:
    """One batch: what it moves, and what is done before and after."""

    exchange: Exchange
    movements: list[Movement]

    def run(self) -> None:
        self.exchange.run()
        for movement in self.movements:
            if movement.plan.source.contributions > 1 or movement.plan.target.contributions > 1:
                complete_contributions(movement.plan, dist.get_rank(), movement.target)


def _stages(prepared: _Prepared, group: dist.ProcessGroup | None) -> list[_Stage]:
    stages = []
    for number in range(prepared.part.batches):
        movements = []
        for item in prepared.part.items:
            if item.batch == number:
                one = item.match
                movements.append(
                    Movement.of(
                        item.plan,
                        item.transfers,
                        dist.get_rank(),
                        prepared.before.locals.get(one.source_name),
                        prepared.after.locals.get(one.name),
                        getattr(torch, as_dtype(one.dtype).name),
                    )
                )
        exchange = Exchange(
            movements, dist.get_rank(), group, prepared.device, prepared.extra_bytes
        )
        stages.append(_Stage(exchange, movements))
    return stages
