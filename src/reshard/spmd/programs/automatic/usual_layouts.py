"""Usual layouts: the common shardings of inputs (dp, FSDP, tp), for each axis of a mesh.

Over an axis a model is

- *data parallel*: the axis shards its batch, and weights are replicated;
- *fully sharded*: weights are sharded as well, and gathered where they are used (FSDP, ZeRO);
- *tensor parallel*: the axis shards weights, and their operators compute in parts.

The batch, and the sharding of weights, are derived from the graph. The batch is the set of inputs
reached by propagation from the one sharded dimension that leaves each device the least computation;
all other inputs are weights. Weights are sharded one after another, the largest first, along the
dimension that takes the least time given the earlier choices; the largest is tried along each of
its dimensions. Small ones, such as those of norms, stay replicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from reshard.sharding import ShardingSpec
from reshard.spmd.programs.automatic.input_search import InputSearch, Seed
from reshard.spmd.propagation.by_cost.nearly_least import Choices
from reshard.spmd.shards.runner import replicated

# Axes that are data or tensor parallel in all combinations; axes behind them are as the last one.
MOST_AXES = 3
# As much computing as the least, in parts of it, and bytes of weights that may stay whole.
NEARLY_LEAST = 1.1
FEW_BYTES = 0.01


class InputLayout(NamedTuple):
    """A sharding of each free input.

    Args:
        specs: the shardings.
        chosen: choices of all variables of the search near these.
        seconds_s: about what the function takes.
        size_bytes: of all these inputs on a rank.
    """

    specs: tuple[ShardingSpec, ...]
    chosen: Choices
    seconds_s: float
    size_bytes: float


def usual_layouts(search: InputSearch) -> list[InputLayout]:
    """Data, fully sharded and tensor parallelism over each axis, those of least time first."""
    batch = _find_batch(search)
    weights = _list_weights(search, batch)
    cut = [number for kind in (*batch, *weights) for number in search.kinds[kind]]
    found: dict[tuple[ShardingSpec, ...], InputLayout] = {}
    for data in _list_data_axes(search):
        begun: list[Seed] = []
        for axis in data:
            begun += _cut_batch(search, begun, batch, axis)
        tensor = [axis for axis in search.mesh.axis_names if axis not in data]
        for dim in _list_dims(search, weights) if tensor else [0]:
            seeds = begun
            for axis in tensor:
                seeds = _cut_weights(search, seeds, weights, axis, dim)
            fully = [some for n in range(len(data) + 1) for some in itertools.combinations(data, n)]
            for axes in (*fully, search.mesh.axis_names):
                one = _shard_fully(search, seeds, cut, axes)
                found.setdefault(one.specs, one)
    return sorted(found.values(), key=lambda one: (one.seconds_s, one.size_bytes))


def _list_data_axes(search: InputSearch) -> list[list[str]]:
    """Which axes may be data parallel, while the others are tensor parallel.

    Of axes of one size the first ones are, as neighbours are tensor parallel.
    """
    names, size_of = search.mesh.axis_names, search.mesh.axis_size
    found = []
    for is_data in itertools.product((True, False), repeat=min(len(names), MOST_AXES)):
        last = [is_data[-1]] * (len(names) - len(is_data))
        own = dict(zip(names, (*is_data, *last), strict=True))
        pairs = itertools.combinations(names, 2)
        if all(own[a] or not own[b] or size_of(a) != size_of(b) for a, b in pairs):
            found.append([axis for axis in names if own[axis]])
    return found


def _list_weights(search: InputSearch, batch: Collection[int]) -> list[int]:
    """The kinds of inputs that are not the batch, without small ones such as those of norms."""
    kinds = [kind for kind in range(len(search.kinds)) if kind not in batch]
    sizes = [sum(float(search.sizes_bytes[n].max()) for n in search.kinds[kind]) for kind in kinds]
    few_bytes = sum(sizes) * FEW_BYTES
    return [kind for place, kind in enumerate(kinds) if sum(sizes[place:]) > few_bytes]


def _list_dims(search: InputSearch, weights: Sequence[int]) -> Sequence[int]:
    """The dimensions of the largest weights."""
    if not weights:
        return [0]
    return range(len(search.graph.values[search.kinds[weights[0]][0]].shape))


def _find_batch(search: InputSearch) -> list[int]:
    """The kinds of inputs that are the batch."""
    axis = max(search.mesh.axis_names, key=search.mesh.axis_size)
    begun = [search.begin([seed]) for seed in search.list_seeds(axis)]
    if not begun:
        return []
    computing_s = list(map(search.problem.computing_s, begun))
    most_s = min(computing_s) * NEARLY_LEAST
    few = [one for one, own_s in zip(begun, computing_s, strict=True) if own_s <= most_s]
    best = min(few, key=search.total.value)
    return [kind for kind in range(len(search.kinds)) if _is_cut(search, best, kind, axis)]


def _is_cut(search: InputSearch, chosen: Choices, kind: int, axis: str) -> bool:
    number, place = search.kinds[kind][0], search.mesh.axis_names.index(axis)
    sharding = search.problem.values[number][chosen[number]]
    return any(part[0] == place for dim in sharding.dims for part in dim)


def _cut_batch(
    search: InputSearch, seeds: Sequence[Seed], batch: Collection[int], axis: str
) -> list[Seed]:
    """The cut of the batch along an axis that takes the least time beside others, if any is."""
    own = [seed for seed in search.list_seeds(axis) if seed.kind in batch]
    return sorted(own, key=lambda seed: search.total.value(search.begin([*seeds, seed])))[:1]


def _cut_weights(
    search: InputSearch, seeds: Sequence[Seed], weights: Sequence[int], axis: str, dim: int
) -> list[Seed]:
    """Seeds, and cuts of weights along an axis beside them.

    The largest weights are cut along a dimension if they can be, since that decides most of what
    can be saved by the others.
    """
    found = list(seeds)
    own = search.list_seeds(axis)
    for place, kind in enumerate(weights):
        waiting = [seed for seed in own if seed.kind == kind]
        if place == 0:
            waiting = [seed for seed in waiting if seed.dim == dim] or waiting
        if waiting and not _is_cut(search, search.begin(found), kind, axis):
            best = min(waiting, key=lambda seed: search.total.value(search.begin([*found, seed])))
            found.append(best)
    return found


def _shard_fully(
    search: InputSearch, seeds: Sequence[Seed], cut: Collection[int], axes: Sequence[str]
) -> InputLayout:
    """The layout of seeds, with inputs cut over axes as well that do not cut them so far.

    Seeds cut those of `cut` alone: small weights are whole, where they are not fully sharded.
    """
    begun, values = search.begin(seeds), search.problem.values
    before = {
        number: search.table.decoded(values[number][begun[number]])
        if number in cut
        else replicated(search.mesh, len(search.graph.values[number].shape))
        for number in search.free
    }
    after = {number: _spread(search, spec, number, axes) for number, spec in before.items()}
    chosen = search.with_inputs(begun, after)
    return InputLayout(
        tuple([search.table.decoded(values[number][chosen[number]]) for number in search.free]),
        chosen,
        search.total.value(chosen),
        sum(float(search.sizes_bytes[number][chosen[number]]) for number in search.free),
    )


def _spread(
    search: InputSearch, spec: ShardingSpec, number: int, axes: Sequence[str]
) -> ShardingSpec:
    """A sharding with each axis, unless it is used, where nothing cuts so far if that can be."""
    mesh, shape = search.mesh, search.graph.values[number].shape
    dims = [[str(axis) for axis in dim.axes] for dim in spec.dim_specs]
    used = {axis.name for dim in spec.dim_specs for axis in dim.axes}
    for axis in axes:
        cuts = [math.prod(map(mesh.axis_size, names)) for names in dims]
        size = mesh.axis_size(axis)
        fits = [n for n, length in enumerate(shape) if length % (cuts[n] * size) == 0]
        if axis not in used and fits:
            dims[min(fits, key=cuts.__getitem__)].append(axis)
    return ShardingSpec(mesh, [sorted(names, key=mesh.axis_names.index) for names in dims])
