"""The program from one sharding to another that moves the fewest elements.

Searches are registered under names, with one signature: a `Problem` in, the states of a program
out, or None where there is no program of legal steps within memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from reshard._validation import check_int, check_ints, check_type
from reshard.collectives.program import Program
from reshard.collectives.search.constructive import constructive_search
from reshard.collectives.search.exact import budgeted_search, exact_search
from reshard.collectives.search.mlir_basis import mlir_decomposition
from reshard.collectives.search.states import CLASSICAL, JOINT, STEPS, Problem, State, problem_of
from reshard.collectives.search.transitions import join_steps, name_step, path_cost
from reshard.collectives.steps import Exchange, Permute, Step
from reshard.errors import PlanError, SpecError, UsageError
from reshard.sharding import ShardingSpec

Search = Callable[[Problem], tuple[State, ...] | None]

SEARCHES: dict[str, Search] = {
    "default": budgeted_search,
    "exact": exact_search,
    "constructive": constructive_search,
}


def find_program(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: Sequence[int],
    *,
    steps: str = JOINT,
    search: str = "default",
    live_shard: int | None = None,
) -> Program:
    """The program that moves the fewest elements.

    Args:
        source, target: shardings of one tensor.
        shape: of the tensor.
        steps: what it may be made of: a key of `STEPS`.
        search: a key of `SEARCHES`. The default is exact up to a fixed amount of work, and
            constructive beyond; it looks at no clock, so all ranks find the same program.
        live_shard: the most elements a shard may have on the way; as many as the larger one of
            source and target when None.

    Raises:
        PlanError: a limit that source or target is over, or no program of these steps.
        UsageError: an unknown search or set of steps.
        SpecError: shardings for tensors of another number of dimensions.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=4, y=2)
    >>> program = find_program(spec(mesh, "x, y"), spec(mesh, "y, x"), (16, 8))
    >>> program, program.moved_elements
    (<Program of [16, 8]: joint all-to-all>, 96)
    >>> find_program(spec(mesh, "x, y"), spec(mesh, "y, x"), (16, 8), steps="classical")
    <Program of [16, 8]: all-to-all, permute>
    """
    for what, name, known in (("search", search, SEARCHES), ("set of steps", steps, STEPS)):
        if not isinstance(name, str) or name not in known:
            raise UsageError(f"unknown {what} {name!r}; it is one of {', '.join(known)}")
    for side, sharding in (("source", source), ("target", target)):
        hint = "a program is between two specs: reshard.spec(mesh, 'tp, -')"
        check_type(sharding, ShardingSpec, side, hint, SpecError)
    limit = None if live_shard is None else check_int(live_shard, "live_shard")
    return _find(source, target, check_ints(shape, "shape", SpecError), steps, search, limit)


@lru_cache(maxsize=4096)
def _find(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: tuple[int, ...],
    steps: str,
    search: str,
    live_shard: int | None,
) -> Program:
    exchange = Program(shape, source, target, (Exchange(shape, source, target),))
    # With "all", the program of a joint search is compared with the exchange at the end.
    problem = problem_of(source, target, shape, live_shard, JOINT if steps == "all" else steps)
    if problem is not None and live_shard is None and steps in (JOINT, "all"):
        # Where all devices together divide a size, whatever is counted grows with it alone: the
        # steps are those of the least such size, which are found once.
        count = source.mesh.size
        alike = tuple([count if size and size % count == 0 else size for size in shape])
        if alike != shape:
            found = _find(source, target, alike, steps, search, None).steps
            return Program(shape, source, target, tuple([replace(s, shape=shape) for s in found]))
    if problem is None:
        states = None
    elif steps == "mlir":
        states = mlir_decomposition(problem)
    else:
        states = SEARCHES[search](problem)
    if problem is None or states is None:
        if steps in (CLASSICAL, "mlir"):
            raise PlanError(
                f"no program of {steps} steps found from `{source}` to `{target}` for shape "
                f"{list(shape)} within its memory; allow an exchange: steps='joint' or 'all'"
            )
        return exchange
    if steps != "mlir":
        states = join_steps(problem, states)
    program = program_of(problem, states, source, target)
    # Nothing moves less than the least that must arrive.
    may_win = steps == "all" and path_cost(problem, states) > problem.distance(problem.source)
    return exchange if may_win and exchange.moved_elements < program.moved_elements else program


def forget() -> None:
    """Clear the cache of programs that were found."""
    _find.cache_clear()


def program_of(
    problem: Problem, states: Sequence[State], source: ShardingSpec, target: ShardingSpec
) -> Program:
    """The program whose shardings are these states; its ends are written as they were given.

    Raises:
        PlanError: states between which no collective is legal.
    """
    space, shape = problem.space, problem.space.shape
    reduction = source.reduction
    specs = [source, *(space.spec(state, reduction) for state in states[1:-1]), target]
    steps: list[Step] = []
    for (before, after), (one, other) in zip(
        itertools.pairwise(states), itertools.pairwise(specs), strict=False
    ):
        named = name_step(space, before, after)
        if named is None:
            raise PlanError(f"no collective leads from `{one}` to `{other}` within its groups")
        kind, primes, dims = named
        axes = space.prime_meshes[before.prime_mesh].axes(primes, one.mesh)
        steps.append(kind(shape, one, other, axes, dims))
    if len(states) == 1 and source.layout(shape) is not target.layout(shape):
        # The same elements on every rank, but empty shards of another shape.
        steps.append(Permute(shape, source, target))
    return Program(shape, source, target, tuple(steps))
