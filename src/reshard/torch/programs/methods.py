"""Methods of moving a tensor: the direct exchange, or a program of collectives.

1. `"exchange"`: each rank receives the elements that it lacks. Any layouts.
2. `"program"`: the program of `find_program`, between shardings over the same devices; an error if
   there is none. A `Program` of the caller is used as it is.
3. `"auto"`: with a topology, the method that `reshard.collectives.choose` estimates as faster, if
   its memory suffices. Without a topology the exchange, which moves the fewest bytes in any memory,
   except for contributions that become replicas. A program combines those once, while the exchange
   combines them on every rank. So the program is used if it moves fewer bytes, and the saving
   exceeds the cost of its messages, each counted as a number of bytes (`assumed_topology`).
4. `"stages"`: each byte enters a host once, and is forwarded within it
   (`reshard.plans.hierarchical`). `"auto"` uses stages if they are faster than the other methods,
   on the topology or, without a topology and with ranks on several hosts, on that of
   `assume_links`.

The choice depends only on data that all ranks have, so it is the same on all of them; its digest
is compared before anything moves.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from reshard.collectives.choice import choose
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.sharding import ShardingSpec
from reshard.topology import Link, Topology
from reshard.torch.endpoint import TensorEndpoint
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.programs.run import min_extra_bytes

Method = str | Program
METHODS = ("auto", "exchange", "program", "stages")
# The cost of a message in bytes without a topology, including all work for it. Links of 50 to
# 450 GB/s send about a megabyte in their latency. Between four ranks of gloo on one host, programs
# are faster from sizes on that correspond to a similar number.
MESSAGE_COUNTS_BYTES = 1 << 20
# The ratio of a byte's time between hosts to that within a host: between eight and nine for NVLink
# and InfiniBand in machines with a card for each rank, and more if ranks share a card.
ASSUMED_SLOWER = 8


def choose_method(
    method: Method,
    topology: Topology | None,
    source: TensorEndpoint,
    target: TensorEndpoint,
    dtype: torch.dtype,
    group: RankGroup,
    device: torch.device,
    extra_bytes: int,
) -> Program | StagedJob | None:
    """Return the program or stages, or None for the exchange. Raises as `choose_program`."""
    program = None
    if method != "stages":
        program = choose_program(
            method, topology, source, target, dtype, group, device, extra_bytes
        )
        if method != "auto":
            return program
    elif (problem := topology_problem(topology)) is not None:
        raise UsageError(problem)
    change = LayoutChange(source.layout, target.layout)
    if not can_be_staged(change):
        return program
    is_known = topology is not None
    topology = topology or find_hosts(group)
    if method == "stages":
        return stage_change(change, as_dtype(dtype), topology)
    # On a single host no data crosses hosts. Without a topology, programs are for contributions.
    if topology.hosts == 1 or (program is not None and not is_known):
        return program
    topology = topology if is_known else assume_links(topology)
    staged = stage_change(change, as_dtype(dtype), topology)
    if program is None:
        other_s = staged.job.estimate(topology).seconds_s
    else:
        library = _library_of(group, device)
        other_s = program.estimate(as_dtype(dtype), topology, library).seconds_s
    return staged if staged.pipelined_s < other_s else program


def can_be_staged(change: LayoutChange) -> bool:
    """Return whether received data can be forwarded: contributions are combined on arrival."""
    return max(change.source.contributions, change.target.contributions) == 1


def choose_program(
    method: Method,
    topology: Topology | None,
    source: TensorEndpoint,
    target: TensorEndpoint,
    dtype: torch.dtype,
    group: RankGroup,
    device: torch.device,
    extra_bytes: int,
) -> Program | None:
    """Return the program to run, or None for the exchange.

    Raises:
        UsageError: an unknown method; method "program" with a side that is not a sharding; a
            program between other layouts, or with more memory than `extra_bytes`.
        PlanError: method "program", and no program is found.
        LayoutError: a topology without a rank or link that is needed.
    """
    if not isinstance(method, Program) and method not in METHODS:
        raise UsageError(
            f"method={method!r}; it is one of {', '.join(map(repr, METHODS))}, or a Program"
        )
    problem = topology_problem(topology)
    if problem is not None:
        raise UsageError(problem)
    if method == "exchange":
        return None
    ranks = len(group.ranks)
    if isinstance(method, Program):
        ends = [
            # Layouts are interned.
            spec.layout(method.shape) is side.layout
            for spec, side in ((method.source, source), (method.target, target))
        ]
        if not all(ends):
            raise UsageError(
                f"a program from `{method.source}` to `{method.target}` for shape "
                f"{list(method.shape)}, which are not the source and target; find one for these"
            )
        return _check_memory(method, dtype, ranks, extra_bytes)
    is_combined = source.layout.contributions > target.layout.contributions
    # Without a topology, a program can only move fewer bytes if it combines contributions.
    if method == "auto" and topology is None and not is_combined:
        return None
    # Programs are between shardings; a plain layout has no mesh axes.
    if source.spec is None or target.spec is None:
        if method == "auto":
            return None
        which = "source" if source.spec is None else "target"
        raise UsageError(
            f"method='program' and a {which} that is a Layout; give a ShardingSpec, or a torch "
            "mesh with placements, or take method='exchange'"
        )
    shape = source.layout.shape
    if method == "program":
        return _check_memory(
            _require_program(source.spec, target.spec, shape), dtype, ranks, extra_bytes
        )
    library = _library_of(group, device)
    is_known = topology is not None
    slots = max(source.layout.slots, target.layout.slots)
    topology = topology or assumed_topology(slots)
    program = _choose_quicker(source.spec, target.spec, shape, dtype, topology, library, is_known)
    if program is None or min_extra_bytes(program, dtype.itemsize, ranks) > extra_bytes:
        return None
    return program


def _library_of(group: RankGroup, device: torch.device) -> str:
    """Return the library whose collectives the group runs: a key of `reshard.cost.LIBRARIES`."""
    return "gloo" if group.backend_of(device) == "gloo" else "nccl"


def topology_problem(topology: object) -> str | None:
    """Return why a value is not a topology, or None if it is or is absent."""
    if topology is None or isinstance(topology, Topology):
        return None
    return (
        f"topology is a {type(topology).__name__}; give a reshard.topology.Topology, such as "
        "load_preset(...).topology()"
    )


def _require_program(source: ShardingSpec, target: ShardingSpec, shape: tuple[int, ...]) -> Program:
    program = find_program(source, target, shape)
    if any(isinstance(step, Exchange) for step in program.steps):
        raise PlanError(
            f"no program of collectives leads from `{source}` on {source.mesh} to `{target}` on "
            f"{target.mesh} for shape {list(shape)}; take method='exchange'"
        )
    return program


def _check_memory(
    program: Program, dtype: torch.dtype, ranks: int, extra_bytes: int
) -> Program | None:
    """Return the program if memory suffices, or None without steps."""
    if not program.steps:
        return None
    least = min_extra_bytes(program, dtype.itemsize, ranks)
    if least > extra_bytes:
        raise UsageError(
            f"extra_bytes={extra_bytes}: too little for {program!r}; give at least {least}, or "
            "take method='exchange'"
        )
    return program


@lru_cache(maxsize=1024)
def _choose_quicker(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    topology: Topology,
    library: str,
    is_known: bool,
) -> Program | None:
    """Return the program if it is faster, or None.

    On an assumed topology, it also has to move fewer bytes than the exchange.
    """
    choice = choose(source, target, shape, dtype, topology, library=library)
    is_less = choice.program.moved_elements < choice.change.moved_elements
    if choice.method == "exchange" or not choice.program.steps or not (is_known or is_less):
        return None
    return choice.program


@lru_cache(maxsize=64)
def assumed_topology(ranks: int) -> Topology:
    """Return a topology on a single host in which a message costs `MESSAGE_COUNTS_BYTES`.

    Its seconds are not real: only their order is used.
    """
    link = Link(bandwidth_bytes_per_s=1.0, latency_s=MESSAGE_COUNTS_BYTES)
    return Topology.of(hosts=1, ranks_per_host=ranks, within_host=link)


def find_gradient_program(
    source: ShardingSpec | None,
    target: ShardingSpec | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ranks: int,
    extra_bytes: int,
) -> Program | None:
    """Return a program for gradients that fits in memory, or None for the exchange."""
    if source is None or target is None:
        return None
    program = find_program(source, target, shape)
    if not program.steps or any(isinstance(step, Exchange) for step in program.steps):
        return None
    fits = min_extra_bytes(program, dtype.itemsize, ranks) <= extra_bytes
    return program if fits else None


@lru_cache(maxsize=256)
def stage_change(change: LayoutChange, dtype: DType, topology: Topology) -> StagedJob:
    """Return the change of a tensor's layout in stages."""
    job = Job([JobItem.between_ranks("tensor", dtype, change.source, change.target)])
    return StagedJob(job, topology)


@lru_cache(maxsize=256)
def _find_stages(
    change: LayoutChange, dtype: DType, topology: Topology, rank: int
) -> tuple[Transfers, ...]:
    (stages,) = stage_change(change, dtype, topology).for_rank(rank)
    return tuple(stages)


def stages_of(staged: StagedJob, rank: int) -> tuple[Transfers, ...]:
    """Return a rank's transfers of the only tensor of a job, stage by stage."""
    (item,) = staged.job.items
    return _find_stages(item.change, item.dtype, staged.topology, rank)


def find_hosts(group: RankGroup) -> Topology:
    """Return which ranks of a group share a host, by their hosts' names; speeds are unknown.

    Ranks outside the group are placed on the host of its first rank.
    """
    return _place_ranks(group.ranks, group.hosts)


@lru_cache(maxsize=64)
def _place_ranks(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> Topology:
    names = [hosts[0]] * (max(ranks) + 1)
    for rank, name in zip(ranks, hosts, strict=True):
        names[rank] = name
    return Topology.of_names(names)


@lru_cache(maxsize=64)
def assume_links(hosts: Topology) -> Topology:
    """Return the topology with assumed links between hosts. Its seconds are not real."""
    near = Link(bandwidth_bytes_per_s=1.0, latency_s=MESSAGE_COUNTS_BYTES)
    far = Link(1.0 / ASSUMED_SLOWER, MESSAGE_COUNTS_BYTES)
    return Topology(hosts.rank_host, hosts.host_rack, near, far, far)
