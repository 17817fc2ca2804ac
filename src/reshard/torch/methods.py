"""By which method is a tensor moved: the direct exchange, or a program of collectives?

1. `"exchange"`: each rank gets what it lacks from ranks that have it. Any layouts.
2. `"program"`: `find_program`'s, between shardings over the same devices. One that cannot be is an
   error. A `Program` of one's own is likewise taken as it is.
3. `"auto"`: with a topology, what `reshard.collectives.choose` says is quicker, if its memory
   suffices. Without one nothing is known of what bytes and messages cost, and the exchange is
   taken: it moves the fewest bytes, in any memory.

The answer follows from what all ranks know, so they find the same; the digest of it is compared
before anything moves.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
import torch.distributed as dist

from reshard.collectives.choice import choose
from reshard.collectives.program import Program
from reshard.collectives.search import find_program
from reshard.collectives.steps import Exchange
from reshard.errors import PlanError, UsageError
from reshard.sharding import ShardingSpec
from reshard.topology import Topology
from reshard.torch.program_run import least_extra_bytes
from reshard.torch.sides import Side

Method = str | Program
METHODS = ("auto", "exchange", "program")


def program_for(
    method: Method,
    topology: Topology | None,
    source: Side,
    target: Side,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    extra_bytes: int,
) -> Program | None:
    """The program to run, or None for the exchange.

    Raises:
        UsageError: an unknown method, a side that is no sharding where a program is asked for, a
            program of others than these sides, or one that `extra_bytes` has no room for.
        PlanError: a program is asked for, and there is none.
        LayoutError: a topology without a rank or link that is needed.
    """
    if not isinstance(method, Program) and method not in METHODS:
        raise UsageError(
            f"method={method!r}; it is one of {', '.join(map(repr, METHODS))}, or a Program"
        )
    if topology is not None and not isinstance(topology, Topology):
        raise UsageError(
            f"topology is a {type(topology).__name__}; give a reshard.topology.Topology, such as "
            "load_preset(...).topology()"
        )
    if method == "exchange":
        return None
    ranks = dist.get_world_size(group)
    if isinstance(method, Program):
        ends = [
            spec.layout(method.shape) is side.layout
            for spec, side in ((method.source, source), (method.target, target))
        ]
        if not all(ends):
            raise UsageError(
                f"a program from `{method.source}` to `{method.target}` for shape "
                f"{list(method.shape)}, which are not the source and target; find one for these"
            )
        return _fitting(method, dtype, ranks, extra_bytes)
    if method == "auto" and topology is None:
        return None
    if source.spec is None or target.spec is None:
        if method == "auto":
            return None
        which = "source" if source.spec is None else "target"
        raise UsageError(
            f"method='program' and a {which} that is a Layout; give a ShardingSpec, or a torch "
            "mesh with placements, or take method='exchange'"
        )
    shape = source.layout.shape
    if topology is None or method == "program":
        return _fitting(_found(source.spec, target.spec, shape), dtype, ranks, extra_bytes)
    library = "gloo" if dist.get_backend(group) == "gloo" else "nccl"
    program = _quicker(source.spec, target.spec, shape, dtype, topology, library)
    if program is None or least_extra_bytes(program, dtype.itemsize, ranks) > extra_bytes:
        return None
    return program


def _found(source: ShardingSpec, target: ShardingSpec, shape: tuple[int, ...]) -> Program:
    program = find_program(source, target, shape)
    if any(isinstance(step, Exchange) for step in program.steps):
        raise PlanError(
            f"no program of collectives leads from `{source}` on {source.mesh} to `{target}` on "
            f"{target.mesh} for shape {list(shape)}; take method='exchange'"
        )
    return program


def _fitting(program: Program, dtype: torch.dtype, ranks: int, extra_bytes: int) -> Program | None:
    """The program, if memory suffices; None where nothing is to do, which the exchange does."""
    if not program.steps:
        return None
    least = least_extra_bytes(program, dtype.itemsize, ranks)
    if least > extra_bytes:
        raise UsageError(
            f"extra_bytes={extra_bytes}: too little for {program!r}; give at least {least}, or "
            "take method='exchange'"
        )
    return program


@lru_cache(maxsize=1024)
def _quicker(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    topology: Topology,
    library: str,
) -> Program | None:
    """The program where it is the quicker one, else None."""
    choice = choose(source, target, shape, dtype, topology, library=library)
    return choice.program if choice.method == "program" and choice.program.steps else None


def program_back(
    source: ShardingSpec | None,
    target: ShardingSpec | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ranks: int,
    extra_bytes: int,
) -> Program | None:
    """A program for gradients, where there is one that fits; the exchange always does."""
    if source is None or target is None:
        return None
    program = find_program(source, target, shape)
    if not program.steps or any(isinstance(step, Exchange) for step in program.steps):
        return None
    fits = least_extra_bytes(program, dtype.itemsize, ranks) <= extra_bytes
    return program if fits else None


@lru_cache(maxsize=1024)
def method_digest(program: Program | None) -> bytes:
    """What tells methods apart: the steps of a program, with their groups and shards."""
    if program is None:
        return b"exchange"
    hasher = hashlib.blake2b(b"program", digest_size=16)
    for step in program.steps:
        hasher.update(step.name.encode() + step.target_layout.fingerprint)
        hasher.update(repr(step.groups).encode())
    return hasher.digest()
