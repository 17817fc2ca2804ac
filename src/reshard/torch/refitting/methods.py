"""Methods of a refit's tensors: each moves in the common exchange, or by a program.

1. `"exchange"`: all tensors move in a single exchange.
2. `"program"`: every tensor moves by the collectives that `find_program` finds. Tensors without a
   program are reported in a single error, raised before any tensor is written.
3. `"auto"`: `reshard.collectives.divide` finds the faster method on a topology. Without a topology,
   programs are considered only where contributions are combined, since only there they move fewer
   bytes than the exchange; the cost of messages is then that of `assumed_topology`.
4. `"stages"`: each byte enters a host once, and is forwarded within it
   (`reshard.plans.hierarchical`). `"auto"` uses stages for all tensors without a program or for
   none, whichever is faster, on the hosts of the topology or those that the ranks reported.
   Tensors that are compared with the previous run use stages only in runs that send all elements:
   changes are few bytes, and are sent directly to each rank that needs them.

Programs move whole, untransformed tensors whose shardings have the same devices on both sides.
Memory between source and target has to fit into the staging part of `extra_bytes`. The choice
follows from data that all ranks have about both models, so every rank makes the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reshard.collectives.choice import Ways, divide
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.text import first_lines
from reshard.topology import Topology
from reshard.torch.programs.methods import assume_links, assumed_topology, can_be_staged
from reshard.torch.programs.phases import between_bytes
from reshard.torch.refitting.matching import Match
from reshard.torch.refitting.options import RefitSettings

_SHOWN = 20
# On any backend the steps are messages in this library's exchange.
_RUN_AS = "gloo"
_EXCHANGED = "every rank has what it needs"


@dataclass(frozen=True, slots=True)
class TensorMethod:
    """How and why a tensor moves: by a program, in stages, or otherwise in the exchange.

    `is_staged_whole` is set if it is compared, and moves in stages in runs that send all of it.
    """

    program: Program | None = None
    why: str = ""
    is_staged: bool = False
    is_staged_whole: bool = False


BY_EXCHANGE = TensorMethod()


def job_of(matches: Iterable[Match]) -> Job:
    """Return tensors as a single job, so that senders are balanced over all of them."""
    # Layers move alike, so equal changes of layouts are computed once.
    cached: dict[tuple[str, int, int], JobItem] = {}
    items = []
    for match in matches:
        # Equal layouts are the same object.
        key = match.dtype, id(match.source), id(match.target)
        item = cached.get(key)
        if item is None:
            ends = match.source, match.target
            item = cached[key] = JobItem.between_ranks(match.name, as_dtype(match.dtype), *ends)
        items.append(item.named(match.name))
    return Job(items)


def choose_methods(
    settings: RefitSettings,
    hosts: Topology | None,
    matches: Sequence[Match],
    staging_bytes: int,
) -> tuple[TensorMethod, ...]:
    """Return the method of every tensor, in their order. Every rank makes the same choice.

    Args:
        settings: the options of the refit.
        hosts: the hosts that the ranks reported, without speeds of their links; None if unknown.
        matches: the tensors.
        staging_bytes: the maximum memory of a tensor between source and target.

    Raises:
        PlanError: method "program", and tensors without a program.
        LayoutError: a topology without a rank or link that is needed.
    """
    if settings.method == "exchange":
        return (BY_EXCHANGE,) * len(matches)
    if settings.method == "stages":
        return _stage(matches, settings, hosts, (BY_EXCHANGE,) * len(matches))
    programs: list[Program | str] = [
        _find_program(match, staging_bytes, settings) for match in matches
    ]
    if settings.method == "program":
        return _require_programs(matches, programs)
    # Only tensors with a program have a choice; the others are exchanged anyway.
    tensors = [
        (LayoutChange(match.source, match.target), as_dtype(match.dtype), program)
        for match, program in zip(matches, programs, strict=True)
        if isinstance(program, Program)
    ]
    divided: Iterator[tuple[bool, Ways]] = iter(())
    # Usually no tensor has a choice, and no times have to be estimated.
    if tensors:
        ranks = [max(plan.source.slots, plan.target.slots) for plan, _, _ in tensors]
        division = divide(tensors, settings.topology or assumed_topology(max(ranks)), _RUN_AS)
        divided = zip(division.by_program, division.ways, strict=True)
    chosen = []
    exchanged = {why: TensorMethod(None, why) for why in set(programs) if isinstance(why, str)}
    for program in programs:
        if isinstance(program, str):
            chosen.append(exchanged[program])
            continue
        # `divided` has an entry for each tensor with a program, in their order.
        is_chosen, ways = next(divided)
        chosen.append(
            TensorMethod(program if is_chosen else None, _explain(ways, is_chosen, settings))
        )
    return _stage(matches, settings, hosts, tuple(chosen))


def _stage(
    matches: Sequence[Match],
    settings: RefitSettings,
    hosts: Topology | None,
    chosen: tuple[TensorMethod, ...],
) -> tuple[TensorMethod, ...]:
    """Return the methods, with stages for tensors without a program if requested or faster."""
    hosts = settings.topology or hosts
    # On a single host no data crosses hosts.
    if hosts is None or (hosts.hosts == 1 and settings.method != "stages"):
        return chosen
    can_be = [
        method.program is None and can_be_staged(LayoutChange(match.source, match.target))
        for match, method in zip(matches, chosen, strict=True)
    ]
    if not any(can_be):
        return chosen
    why = "asked for"
    if settings.method != "stages":
        job = job_of(match for match, can in zip(matches, can_be, strict=True) if can)
        hosts = hosts if settings.topology is not None else assume_links(hosts)
        staged_s, direct_s = StagedJob(job, hosts).pipelined_s, job.estimate(hosts).seconds_s
        if staged_s >= direct_s:
            return chosen
        why = f"{staged_s:.3g} s for all that is staged, {direct_s:.3g} s in the exchange"
        if settings.topology is None:
            why = "hosts are distinguished by their names, and links between them are slower"
    compares = settings.changed_only and settings.method == "auto"
    always, when_whole = (
        TensorMethod(None, why, is_staged=True),
        TensorMethod(None, f"where all of it travels: {why}", is_staged_whole=True),
    )
    return tuple(
        method if not can else when_whole if compares and match.can_be_compared else always
        for match, method, can in zip(matches, chosen, can_be, strict=True)
    )


def _find_program(match: Match, staging_bytes: int, settings: RefitSettings) -> Program | str:
    """Return a tensor's program; or why it has none, or is not considered for one."""
    if match.made_at:
        return "a transform makes it"
    if match.source_range is not None or match.target_range is not None:
        return "it is a piece of a fused tensor"
    if match.specs is None:
        return "a side of it is not a DTensor"
    # Without a topology times are unknown, so a program has to move fewer bytes.
    is_assumed = settings.method == "auto" and settings.topology is None
    if is_assumed and match.source.contributions <= match.target.contributions:
        return "no topology is given, and nothing of it is combined"
    program = find_program(*match.specs, match.source.shape)
    if not program.steps:
        return _EXCHANGED
    if any(isinstance(step, Exchange) for step in program.steps):
        return f"no program leads from `{match.specs[0]}` to `{match.specs[1]}`"
    least = LayoutChange(match.source, match.target).moved_elements if is_assumed else 0
    if is_assumed and program.moved_elements >= least:
        return "no topology is given, and its program moves no less"
    needed = between_bytes(program, as_dtype(match.dtype).itemsize_bytes)
    if needed > staging_bytes:
        return (
            f"its program needs {needed} bytes between source and target, and extra_bytes "
            f"leaves {staging_bytes}"
        )
    return program


def _require_programs(
    matches: Sequence[Match], programs: Sequence[Program | str]
) -> tuple[TensorMethod, ...]:
    problems = [
        f"{match.name}: {program}"
        for match, program in zip(matches, programs, strict=True)
        if isinstance(program, str) and program != _EXCHANGED
    ]
    if problems:
        lines = first_lines(problems, _SHOWN)
        raise PlanError(
            f"method='program', but {len(problems)} of {len(matches)} tensors have no program; "
            f"take method='auto':{lines}"
        )
    return tuple(
        TensorMethod(None, program)
        if isinstance(program, str)
        else TensorMethod(program, "asked for")
        for program in programs
    )


def _explain(ways: Ways, is_chosen: bool, settings: RefitSettings) -> str:
    """Return why a tensor that has a program moves by it, or does not."""
    if settings.topology is None:
        by_exchange, by_program = (
            f"{int(sum(part.busiest_bytes for part in parts))} bytes"
            for parts in ((ways.exchange,), ways.program)
        )
    else:
        by_exchange, by_program = (
            f"{seconds_s:.3g} s" for seconds_s in (ways.exchange_s, ways.program_s)
        )
    text = f"{by_program} by its program, {by_exchange} in the exchange"
    saves = not is_chosen and ways.program_s < ways.exchange_s
    return text + (", which is less than what waits between steps take" if saves else "")
