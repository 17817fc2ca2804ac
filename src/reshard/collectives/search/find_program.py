"""The program from a sharding to another that moves the fewest elements.

Searches are registered by name. Each is a function from a `Problem` to the states of a program, or
None without a program of legal steps within memory.
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
from reshard.collectives.search.states import CLASSICAL, JOINT, STEPS, Problem, State, make_problem
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
    """Find the program that moves the fewest elements.

    Args:
        source, target: shardings of a tensor.
        shape: of the tensor.
        steps: the set of steps that it may have: a key of `STEPS`.
        search: a key of `SEARCHES`. The default is exact up to a fixed amount of work, and
            constructive beyond. It does not depend on time, so all ranks find the same program.
        live_shard: the maximum number of elements of a shard between steps; by default as many as
            the larger of the source's and the target's.

    Raises:
        PlanError: a limit that source or target exceeds, or no program of these steps.
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
    for argument, name, choices in (("search", search, SEARCHES), ("steps", steps, STEPS)):
        if not isinstance(name, str) or name not in choices:
            raise UsageError(f"{argument}={name!r}: expected one of {', '.join(choices)}")
    for side, sharding in (("source", source), ("target", target)):
        hint = "a program is between two specs: reshard.spec(mesh, 'tp, -')"
        check_type(sharding, ShardingSpec, side, hint, SpecError)
    limit = None if live_shard is None else check_int(live_shard, "live_shard")
    return _find(source, target, check_ints(shape, "shape", SpecError), steps, search, limit)


# The layers of a model ask for the same programs again and again.
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
    problem = make_problem(source, target, shape, live_shard, JOINT if steps == "all" else steps)
    if problem is not None and live_shard is None and steps in (JOINT, "all"):
        # All counts are proportional to a size that the number of devices divides, so its steps are
        # those of the smallest such size, which are cached.
        count = source.mesh.size
        smallest = tuple([count if size and size % count == 0 else size for size in shape])
        if smallest != shape:
            scaled = _find(source, target, smallest, steps, search, None).steps
            return Program(shape, source, target, tuple([replace(s, shape=shape) for s in scaled]))
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
    program = make_program(problem, states, source, target)
    # An exchange can only win over a program that moves more than the lower bound.
    may_win = steps == "all" and path_cost(problem, states) > problem.distance(problem.source)
    return exchange if may_win and exchange.moved_elements < program.moved_elements else program


def forget() -> None:
    """Clear the cache of programs."""
    _find.cache_clear()


def make_program(
    problem: Problem, states: Sequence[State], source: ShardingSpec, target: ShardingSpec
) -> Program:
    """Return the program through `states`, with the original shardings at its ends.

    Raises:
        PlanError: adjacent states between which no collective is legal.
    """
    space, shape = problem.space, problem.space.shape
    reduction = source.reduction
    specs = [source, *(space.spec(state, reduction) for state in states[1:-1]), target]
    steps: list[Step] = []
    for (before, after), (old, new) in zip(
        itertools.pairwise(states), itertools.pairwise(specs), strict=False
    ):
        named = name_step(space, before, after)
        if named is None:
            raise PlanError(f"no collective leads from `{old}` to `{new}` within its groups")
        kind, primes, dims = named
        axes = space.prime_meshes[before.prime_mesh].axes(primes, old.mesh)
        steps.append(kind(shape, old, new, axes, dims))
    if len(states) == 1 and source.layout(shape) is not target.layout(shape):
        # The elements are the same on every rank, but empty shards have another shape.
        steps.append(Permute(shape, source, target))
    return Program(shape, source, target, tuple(steps))
