"""The decomposition of a change into the four basic steps of MLIR's notes on resharding.

The basis: slice a dimension, gather its minor axis, exchange two axes of one dimension, move a
minor axis to another dimension. The notes weigh no traffic and no memory, so neither does this::

    [[0, 1]] -> [[1]]          [[0, 1]] -> [[1, 0]] -> [[1]]                   swap, gather
    [[0], [1]] -> [[1], [0]]   [[0], [1]] -> [[0], []] -> [[], [0]] -> [[1], [0]]

As long as a dimension's axes do not begin as the target's do:

1. A minor axis whose place in another dimension is next moves there.
2. A minor axis that the target does not use is gathered.
3. An axis that could do either, were it minor, is swapped there; axes that only stand in
   another order are swapped into the target's.
4. Where nothing of that is possible, the axes of the last such dimension block each other, and
   its minor axis is gathered.

In the end every dimension is sliced. Where uneven cuts make a step illegal, the dimensions it
touches are gathered in full instead.

Source: MLIR, `mlir/include/mlir/Dialect/Mesh/Transforms/ReshardingSpmdizationDoc.md`, with its
gather of a major axis put right: a swap comes first, as its own fourth example says.
"""

from __future__ import annotations

from reshard.collectives.search.states import Cut, Problem, State, flatten_cut
from reshard.collectives.search.transitions import name_step
from reshard.collectives.steps import JointAllToAll
from reshard.errors import PlanError

Unit = tuple[int, ...]
Dims = tuple[tuple[Unit, ...], ...]


def mlir_decomposition(problem: Problem) -> tuple[State, ...]:
    """The states that the notes' basis leads through.

    Raises:
        PlanError: meshes or sub-axes that have no parts in common, dimensions of several levels.
    """
    if len(problem.space.prime_meshes) > 1 or any(problem.nested_cuts):
        raise PlanError(
            "MLIR's basis is for one mesh and one level a dimension; take steps='joint' for "
            "device orders and levels"
        )
    target = problem.target
    path = [problem.source]
    # The basis has no reductions: one all-reduce comes before it.
    if problem.source.pending != target.pending:
        path.append(problem.source._replace(pending=target.pending))
    wanted = _split_units(problem, target.cuts)
    while True:
        here = path[-1]
        dims = _split_units(problem, here.cuts)
        after = _replace_dims(here, _take_step(dims, wanted))
        if after.cuts == here.cuts:
            return tuple(path)
        named = name_step(problem.space, here, after)
        if named is None or named[0] is JointAllToAll:
            touched = [
                d for d, (a, b) in enumerate(zip(here.cuts, after.cuts, strict=True)) if a != b
            ]
            # From a dimension that is gathered in full any slice is legal, and so is the gather.
            full = tuple(() if d in touched else cut for d, cut in enumerate(here.cuts))
            if full != here.cuts:
                path.append(here._replace(cuts=full))
            after = _slice_dims(here._replace(cuts=full), problem, touched)
            if after.cuts == full:
                continue
        path.append(after)


def _slice_dims(state: State, problem: Problem, dims: list[int]) -> State:
    """Dimensions that hold everything, cut as the target's where no axis is in use elsewhere."""
    cuts = list(state.cuts)
    for dim in dims:
        used = {prime for d, cut in enumerate(cuts) if d != dim for prime in flatten_cut(cut)}
        if not used & set(flatten_cut(problem.target.cuts[dim])):
            cuts[dim] = problem.target.cuts[dim]
    return state._replace(cuts=tuple(cuts))


def _split_units(problem: Problem, cuts: tuple[Cut, ...]) -> Dims:
    """Per dimension, the axes as both shardings use them: neighbouring parts stay together."""
    units = problem.space.prime_meshes[0].units
    return tuple(
        tuple(unit for prime in flatten_cut(cut) for unit in units if unit[0] == prime)
        for cut in cuts
    )


def _replace_dims(state: State, dims: Dims) -> State:
    cuts = tuple((tuple(a for unit in dim for a in unit),) if dim else () for dim in dims)
    return state._replace(cuts=cuts)


def _take_step(dims: Dims, wanted: Dims) -> Dims:
    """The dimensions one basic step on; the same ones when nothing is left to do."""
    home = {unit: d for d, units in enumerate(wanted) for unit in units}
    unfinished = [d for d, dim in enumerate(dims) if dim != wanted[d][: len(dim)]]

    def moves(dim: int, unit: Unit) -> bool:
        to = home.get(unit)
        return to not in (None, dim) and (*dims[to], unit) == wanted[to][: len(dims[to]) + 1]

    # 1. Move a minor axis to the dimension where it is next.
    for dim in unfinished:
        minor = dims[dim][-1]
        if moves(dim, minor):
            to = home[minor]
            return _replace_some(dims, {dim: dims[dim][:-1], to: (*dims[to], minor)})
    # 2. Gather a minor axis that the target does not use.
    for dim in unfinished:
        if dims[dim][-1] not in home:
            return _replace_some(dims, {dim: dims[dim][:-1]})
    # 3. Swap an axis that could do either to the minor place, or all into the target's order.
    for dim in unfinished:
        for unit in reversed(dims[dim]):
            if unit not in home or moves(dim, unit):
                rest = tuple(other for other in dims[dim] if other != unit)
                return _replace_some(dims, {dim: (*rest, unit)})
        ordered = wanted[dim][: len(dims[dim])]
        if set(ordered) == set(dims[dim]):
            return _replace_some(dims, {dim: ordered})
    # 4. The axes block one another: gather one.
    if unfinished:
        return _replace_some(dims, {unfinished[-1]: dims[unfinished[-1]][:-1]})
    return wanted


def _replace_some(dims: Dims, changed: dict[int, tuple[Unit, ...]]) -> Dims:
    return tuple(changed.get(d, dim) for d, dim in enumerate(dims))
