"""The decomposition of a change into the four basic steps of MLIR's notes on resharding.

The basis: slice a dimension, gather its minor axis, exchange two axes of a dimension, move a minor
axis to another dimension. The notes consider neither traffic nor memory, and neither does this::

    [[0, 1]] -> [[1]]          [[0, 1]] -> [[1, 0]] -> [[1]]                   swap, gather
    [[0], [1]] -> [[1], [0]]   [[0], [1]] -> [[0], []] -> [[], [0]] -> [[1], [0]]

While the axes of a dimension are not a prefix of the target's:

1. A minor axis that is the next axis of another dimension moves there.
2. A minor axis that the target does not use is gathered.
3. An axis to which either would apply as the minor axis is swapped there; axes that only have
   another order are swapped into the target's.
4. Otherwise the axes block each other, and the minor axis of the last such dimension is gathered.

At the end every dimension is sliced. If uneven parts make a step illegal, the dimensions that it
changes are gathered in full instead.

Source: MLIR, `mlir/include/mlir/Dialect/Mesh/Transforms/ReshardingSpmdizationDoc.md`, with its
gather of a major axis corrected: a swap comes first, as in its own fourth example.
"""

from __future__ import annotations

from reshard.collectives.search.states import Cut, Problem, State, flatten_cut
from reshard.collectives.search.transitions import name_step
from reshard.collectives.steps import JointAllToAll
from reshard.errors import PlanError

Unit = tuple[int, ...]
Dims = tuple[tuple[Unit, ...], ...]


def mlir_decomposition(problem: Problem) -> tuple[State, ...]:
    """Return the states of a program of the notes' basis.

    Raises:
        PlanError: meshes or sub-axes without common parts, or dimensions with several levels.
    """
    if len(problem.space.prime_meshes) > 1 or any(problem.nested_cuts):
        raise PlanError(
            "MLIR's basis needs a single mesh, and a single level in each dimension; use "
            "steps='joint' for device orders and levels"
        )
    target = problem.target
    path = [problem.source]
    # Reductions are not in the basis: an all-reduce comes first.
    if problem.source.partial != target.partial:
        path.append(problem.source._replace(partial=target.partial))
    target_dims = _split_units(problem, target.cuts)
    while True:
        here = path[-1]
        dims = _split_units(problem, here.cuts)
        after = _replace_dims(here, _take_step(dims, target_dims))
        if after.cuts == here.cuts:
            return tuple(path)
        named = name_step(problem.space, here, after)
        if named is None or named[0] is JointAllToAll:
            touched = [
                d for d, (a, b) in enumerate(zip(here.cuts, after.cuts, strict=True)) if a != b
            ]
            # Gathering a dimension in full is legal, and so is any slice of it.
            full = tuple(() if d in touched else cut for d, cut in enumerate(here.cuts))
            if full != here.cuts:
                path.append(here._replace(cuts=full))
            after = _slice_dims(here._replace(cuts=full), problem, touched)
            if after.cuts == full:
                continue
        path.append(after)


def _slice_dims(state: State, problem: Problem, dims: list[int]) -> State:
    """Slice replicated dimensions as in the target, if the axes are not in use elsewhere."""
    cuts = list(state.cuts)
    for dim in dims:
        used = {prime for d, cut in enumerate(cuts) if d != dim for prime in flatten_cut(cut)}
        if not used & set(flatten_cut(problem.target.cuts[dim])):
            cuts[dim] = problem.target.cuts[dim]
    return state._replace(cuts=tuple(cuts))


def _split_units(problem: Problem, cuts: tuple[Cut, ...]) -> Dims:
    """Return the axes of each dimension as both shardings use them, with adjacent parts joined."""
    units = problem.space.prime_meshes[0].units
    return tuple(
        tuple(unit for prime in flatten_cut(cut) for unit in units if unit[0] == prime)
        for cut in cuts
    )


def _replace_dims(state: State, dims: Dims) -> State:
    cuts = tuple((tuple(a for unit in dim for a in unit),) if dim else () for dim in dims)
    return state._replace(cuts=cuts)


def _take_step(dims: Dims, target_dims: Dims) -> Dims:
    """Return the dimensions after a basic step, unchanged if nothing is left to do."""
    home = {unit: d for d, units in enumerate(target_dims) for unit in units}
    unfinished = [d for d, dim in enumerate(dims) if dim != target_dims[d][: len(dim)]]

    def moves(dim: int, unit: Unit) -> bool:
        to = home.get(unit)
        return to not in (None, dim) and (*dims[to], unit) == target_dims[to][: len(dims[to]) + 1]

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
        ordered = target_dims[dim][: len(dims[dim])]
        if set(ordered) == set(dims[dim]):
            return _replace_some(dims, {dim: ordered})
    # 4. The axes block one another: gather an axis.
    if unfinished:
        return _replace_some(dims, {unfinished[-1]: dims[unfinished[-1]][:-1]})
    return target_dims


def _replace_some(dims: Dims, changed: dict[int, tuple[Unit, ...]]) -> Dims:
    return tuple(changed.get(d, dim) for d, dim in enumerate(dims))
