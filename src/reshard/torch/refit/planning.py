"""Who works out what each rank does in a refit, and from what?

*Local*: every rank learns what all others have, and works out its own part. *Centralized*: only
the group's first rank learns it, works out all parts and gives each rank its own. The parts are
the same, and so is the error where models do not fit: on every rank.

Centralized planning is worth it where ranks are many and slow and their models large; the first
rank's time and bytes then grow with the number of ranks, which `PlanningReport` tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from reshard.errors import ReshardError, ShardError
from reshard.torch.exchange.metadata import gather, scatter
from reshard.torch.models.naming import fitting
from reshard.torch.models.rosters import Roster, assemble
from reshard.torch.refit.matching import Cast, match
from reshard.torch.refit.methods import RefitMethods
from reshard.torch.refit.parts import RefitPart, RefitPlan, staging_limit_bytes
from reshard.torch.refit.transforms import Transform

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
        made_at_source: the tensors, of those that this rank has a part in, that transforms make
            before they are sent.
        made_at_target: likewise those that they make of what has arrived, and why.
        programs: likewise those that move by a program of collectives, with its steps and why.
        exchanged: likewise why all others do not, where programs are thought of.
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


@dataclass(frozen=True, slots=True)
class Matching:
    """How both models are compared: the same on every rank."""

    ties: Mapping[str, str]
    cast: Cast
    strict: bool
    transforms: Mapping[str, Transform]
    extra_bytes: int
    methods: RefitMethods = field(default_factory=RefitMethods)

    def transforms_of(self, names: Iterable[str]) -> dict[str, Transform]:
        """The transform of every tensor that one makes; what it makes besides has none."""
        found: dict[str, Transform] = {}
        made: set[str] = set()
        for name in names:
            transform = fitting(name, self.transforms)
            if transform is not None and name not in made:
                found[name] = transform
                made.update(transform.outputs(name))
        return found

    def plan(self, before: Mapping[int, Roster], after: Mapping[int, Roster]) -> RefitPlan:
        """The tensors to move. Raises ShardError with all that does not fit."""
        source, problems = assemble(before, "source")
        target, more = assemble(after, "target")
        problems += more
        # What a side has, but ranks describe differently, is told once, and not as missing too.
        unclear = _names(before) - source.keys(), _names(after) - target.keys()
        source = {name: held for name, held in source.items() if name not in unclear[1]}
        target = {name: held for name, held in target.items() if name not in unclear[0]}
        problems += [
            f"{name}: not in the target, but a transform is given for it"
            for name in self.transforms
            if "*" not in name and name not in _names(after)
        ]
        made_by = self.transforms_of(target)
        matches, more = match(source, target, self.ties, self.cast, self.strict, made_by)
        problems += more
        if problems:
            shown = "\n  ".join(problems[:_SHOWN])
            rest = len(problems) - _SHOWN
            raise ShardError(
                f"{len(problems)} thing{'s do' if len(problems) > 1 else ' does'} not fit; nothing "
                f"was written:\n  {shown}" + (f"\n  ... {rest} more" if rest > 0 else "")
            )
        staging_bytes = staging_limit_bytes(self.extra_bytes)
        return RefitPlan(tuple(matches), staging_bytes, self.methods.of(matches, staging_bytes))


def _names(rosters: Mapping[int, Roster]) -> set[str]:
    return {entry.name for roster in rosters.values() for entry in roster.entries}


def planned(
    matching: Matching,
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
        found = plan_or_error(matching, gathered.values)
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
    made = {
        where: {
            one.match.made_of: one.match.why for one in part.items if one.match.made_at == where
        }
        for where in ("source", "target")
    }
    report = PlanningReport(
        planning,
        gathered.received_bytes,
        scattered_bytes,
        len(ranks) * is_first if is_central else 1,
        _peak_memory_bytes() - had_bytes,
        time.perf_counter() - begun_s,
        tuple(made["source"]),
        made["target"],
        *_methods_told(part),
    )
    return part, report


def _methods_told(part: RefitPart) -> tuple[dict[str, str], dict[str, str]]:
    """What moves by programs, and why the rest does not, by name."""
    programs, exchanged = dict[str, str](), dict[str, str]()
    for one in part.items:
        if one.chosen.program is not None:
            steps = ", ".join(map(str, one.chosen.program.steps))
            programs[one.match.name] = f"{steps}: {one.chosen.why}"
        elif one.chosen.why:
            exchanged[one.match.name] = one.chosen.why
    return programs, exchanged


def plan_or_error(
    matching: Matching, rosters: Mapping[int, tuple[Roster, Roster]]
) -> RefitPlan | ReshardError:
    """The plan of both models, or why there is none; every rank that waits for it is told."""
    try:
        plan = matching.plan(
            {rank: before for rank, (before, _) in rosters.items()},
            {rank: after for rank, (_, after) in rosters.items()},
        )
        # What can be wrong with a plan is wrong now, not for one rank later.
        plan.job.line, plan.batches  # noqa: B018
    except ReshardError as error:
        return error
    except Exception as error:
        # A transform of the user's: the other ranks wait for this.
        return ShardError(f"nothing was written: {type(error).__name__}: {error}")
    return plan


def _peak_memory_bytes() -> int:
    """The most memory this process ever had; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
