"""Input search: fast shardings of a graph's inputs, for a given price of memory.

The search minimizes the sum of `cost_problem` with all inputs free, in which a value that several
operations read is moved once, plus the bytes of some values on a rank times a price. If the graph
permits it, the minimum is found by elimination. Otherwise

1. *seeds* are combined: a seed shards a dimension of inputs of a kind over an axis, the strategy
   "aggressive" propagates it through the graph, and each operation runs with its best sharding. The
   best seed is kept, and others are added as long as they improve the result;
2. the best combinations, or known programs, are improved by *descent*, a value at a time, then in
   *windows*: neighbouring values and operations, optimized together by elimination.

Inputs of a kind have the same shape, element type and readers, which are between similar
operations, such as a weight in each layer of a model. Data parallelism is a seed, tensor
parallelism a seed for each block of a layer, and sharding that saves memory results from the price.

*Candidate layouts* are the common shardings of inputs, for each axis of the mesh: over an axis a
model is

- *data parallel*: the axis shards its batch, and weights are replicated;
- *fully sharded*: weights are sharded as well, and gathered where they are used (FSDP, ZeRO);
- *tensor parallel*: the axis shards weights, and their operators compute in parts.

The batch is the set of inputs reached by propagation from the single sharded dimension that leaves
each device the least computation; all other inputs are weights. Weights are sharded one after
another, the largest first, along the dimension that takes the least time given the earlier choices;
the largest is tried along each of its dimensions. Small ones, such as those of norms, stay
replicated.

*Optimal inputs* of a small graph are found with a proof, by best-first branch and bound (Land and
Doig, 1960). Inputs are chosen in turn. A partial choice has a lower bound: the minimum
sum, in which every movement has the time of a bound that no program stays below, or of its program
if that is known, and a value that several operations read is moved once. Choices whose inputs alone
exceed the limit are discarded::

    x: rows                 w: whole         9 us     evaluated: 11 us
       17 us                   columns      12 us     discarded
    x: columns  14 us                                 discarded

The partial choice with the lowest bound is expanded first: its movements are priced with their
programs, which may raise the bound, then the next input is chosen. A complete choice is traced and
evaluated. If no remaining bound is below the best program found, that program is optimal.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.dtypes import dtype
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.core.array_type import replicated
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axes import AxisTable, Sharding, size_of
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.cost_propagation import Choices, improved
from reshard.spmd.propagation.by_cost.factor_graph import CostTable, FloatArray
from reshard.spmd.propagation.by_cost.movements import NOTHING
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate_by_rules

# Kinds of inputs that are seeds, the largest first; seeds that are tried with those that were kept;
# and seeds that are kept for an axis.
MAX_KINDS = 24
MAX_COMBINED = 8
MAX_SEEDS = 12
# Combinations of seeds that descend, the fastest first.
MAX_DESCENTS = 8


class Seed(NamedTuple):
    """A dimension of all inputs of a kind, sharded over an axis of the mesh."""

    kind: int
    dim: int
    axis: str


class InputSearch:
    """The search for a graph.

    Args:
        graph: the function.
        annotations: shardings of some values, by their numbers.
        free: the inputs whose shardings are looked for.
        ties: values that have the sharding of an input, by the numbers of both.
        mesh: the mesh over whose axes inputs may be sharded.
        machine: links and devices.
    """

    def __init__(
        self,
        graph: Graph,
        annotations: Mapping[int, ShardingSpec],
        free: Sequence[int],
        ties: Mapping[int, int],
        mesh: DeviceMesh,
        machine: Machine,
    ) -> None:
        self.graph = graph
        self.annotations = dict(annotations)
        self.free = tuple(free)
        self.mesh = mesh
        self.table = AxisTable.of(mesh)
        self.kinds = self._find_kinds()
        self.problem = CostProblem(graph, self.table, CostModel.of(self.table, machine))
        self._base = propagate_by_rules(graph, self._annotate(()), strategy="aggressive")
        self.problem.candidates(annotations, {}, [self._base], self.free, ties)
        self.problem.fill(bounds=False)
        self.total = self.problem.sum()
        self.sizes_bytes = {number: self._count_bytes(number) for number in self.free}
        self._begun: dict[tuple[Seed, ...], Choices] = {}
        self._ways = range(len(graph.values), len(self.total.choices))

    @cached_property
    def byte_s(self) -> float:
        """About the seconds of the function for each byte of its free inputs: a scale of prices."""
        optimal = self.total.eliminated()
        seconds_s = min(map(self.total.value, self._seeds if optimal is None else [optimal]))
        return seconds_s / max(sum(self._count_whole(number) for number in self.free), 1)

    def least(
        self,
        price_s: float,
        held: Collection[int],
        near: Sequence[Sequence[ShardingSpec | None]] = (),
    ) -> Choices:
        """Return fast choices for a price of memory.

        Args:
            price_s: seconds for each byte that the busiest rank has.
            held: variables of `problem`: values, and operations with all that they read and make.
            near: shardings of all values, near which to look; near seeds when there are none.
        """
        self.problem.charge(self._charge(price_s, held))
        total = self.problem.sum()
        chosen = total.eliminated()
        if chosen is not None:
            return improved(self.problem, (), [chosen], is_least=True)[0]
        begun = [
            # Without sweeps, values keep their choices, and only the operations' ways are chosen.
            total.descended(self._find_nearest(specs), self._ways, sweeps=0)
            for specs in near
        ] or sorted(self._seeds, key=total.value)[:MAX_DESCENTS]
        return improved(self.problem, begun)[0]

    def descended(self, start: Choices) -> tuple[Choices, float]:
        """Descend from choices with the inputs fixed; return the result and its time."""
        charges = []
        for number in self.free:
            # Other choices of the inputs are excluded by an infinite time.
            seconds_s = np.full(len(self.problem.values[number]), math.inf)
            seconds_s[start[number]] = 0.0
            charges.append(CostTable((number,), seconds_s))
        self.problem.charge(charges)
        total = self.problem.sum()
        chosen = total.descended_in_windows(start, self._ways)
        return chosen, total.value(chosen)

    def _charge(self, price_s: float, held: Collection[int]) -> list[CostTable]:
        problem, first = self.problem, len(self.graph.values)
        counts = Counter(
            problem.variables[variable] if variable < first else variable for variable in held
        )
        tables: dict[object, FloatArray] = {}
        charges = []
        for variable, count in sorted(counts.items()):
            if variable >= first:
                size_bytes = self._count_run_bytes(variable - first)
                charges.append(CostTable((variable,), size_bytes * price_s))
                continue
            # Equal tables stay the same object, by which equal layers are recognized.
            value = self.graph.values[variable]
            key = (value.shape, value.dtype, id(problem.values[variable]), count)
            if key not in tables:
                tables[key] = self._count_bytes(variable) * (price_s * count)
            charges.append(CostTable((variable,), tables[key]))
        return charges

    def held_bytes(self, chosen: Choices, held: Collection[int]) -> float:
        """Return the bytes that a rank has of some variables, as of `least`, in choices."""
        return sum(
            float(table.seconds_s[chosen[table.variables[0]]]) for table in self._charge(1.0, held)
        )

    def placed(self, chosen: Choices) -> PropagatedGraph:
        """Return the graph with what was chosen."""
        return self.problem.answer(chosen, self._base)

    def _find_kinds(self) -> list[tuple[int, ...]]:
        """Return groups of inputs with equal readers, the largest first."""
        # The readers of an identity's result count as readers of its operand.
        inputs = {number: number for number in self.free}
        readers: dict[int, list[object]] = {number: [] for number in self.free}
        for operation, alike in zip(self.graph.operations, _find_alike(self.graph), strict=True):
            for place, operand in enumerate(operation.operands):
                if operand not in inputs:
                    continue
                if operation.operator == "identity":
                    inputs[operation.results[0]] = inputs[operand]
                else:
                    readers[inputs[operand]].append((alike, place))
        kinds: dict[object, list[int]] = {}
        for number in self.free:
            value = self.graph.values[number]
            key = (value.shape, value.dtype, tuple(readers[number]))
            kinds.setdefault(key, []).append(number)
        groups = sorted(kinds.values(), key=lambda group: -len(group) * self._count_whole(group[0]))
        return [tuple(group) for group in groups]

    def _count_whole(self, number: int) -> int:
        value = self.graph.values[number]
        return math.prod(value.shape) * dtype(value.dtype).itemsize_bytes

    def _count_bytes(self, number: int, shardings: Sequence[Sharding] | None = None) -> FloatArray:
        """Return the bytes of a value on a rank in each of some shardings, or its candidates."""
        value = self.graph.values[number]
        counts = [
            math.prod(
                -(-size // size_of(axes))
                for size, axes in zip(value.shape, sharding.dims, strict=True)
            )
            for sharding in (self.problem.values[number] if shardings is None else shardings)
        ]
        return np.array(counts, dtype=np.float64) * dtype(value.dtype).itemsize_bytes

    def _count_run_bytes(self, number: int) -> FloatArray:
        """Return the bytes of all that an operation reads and makes, for each of its ways."""
        operation, ways = self.graph.operations[number], self.problem.ways[number]
        values = (*operation.operands, *operation.results)
        total = np.zeros(len(ways.options))
        for value, shardings in zip(values, ways.shardings, strict=True):
            total += self._count_bytes(value, shardings)
        return total

    def _annotate(self, seeds: Sequence[Seed]) -> dict[int, ShardingSpec]:
        """Return the annotations, with free inputs open and cut by seeds."""
        cuts: dict[tuple[int, int], list[str]] = {}
        for kind, dim, axis in seeds:
            for number in self.kinds[kind]:
                cuts.setdefault((number, dim), []).append(axis)
        open_ = {
            number: ShardingSpec(
                self.mesh,
                [
                    DimSpec(cuts.get((number, dim), []), is_open=True)
                    for dim in range(len(self.graph.values[number].shape))
                ],
            )
            for number in self.free
        }
        return self.annotations | open_

    @cached_property
    def _seeds(self) -> list[Choices]:
        """The choices of seeds and of combinations of seeds that help."""
        laid: list[Seed] = []
        evaluated: dict[Choices, float] = {}

        def judge(*seeds: Seed) -> float:
            chosen = self.begin(seeds)
            if chosen not in evaluated:
                evaluated[chosen] = self.total.value(chosen)
            return evaluated[chosen]

        best_s = judge()
        for axis in self.mesh.axis_names:
            waiting = self.list_seeds(axis)
            for _ in range(MAX_SEEDS):
                if not waiting:
                    break
                judged = [(judge(*laid, seed), place) for place, seed in enumerate(waiting)]
                least_s, place = min(judged)
                if least_s >= best_s:
                    break
                best_s = least_s
                laid.append(waiting[place])
                ordered = [waiting[at] for _, at in sorted(judged)]
                # An axis cuts an input once: further seeds of the kind would not apply.
                waiting = [seed for seed in ordered if seed.kind != laid[-1].kind][:MAX_COMBINED]
        return list(evaluated)

    def list_seeds(self, axis: str) -> list[Seed]:
        """Return the seeds along an axis, those of the largest inputs first."""
        size = self.mesh.axis_size(axis)
        return [
            Seed(kind, dim, axis)
            for kind, some in enumerate(self.kinds[:MAX_KINDS])
            for dim, length in enumerate(self.graph.values[some[0]].shape)
            if length % size == 0
        ]

    def begin(self, seeds: Iterable[Seed]) -> Choices:
        """Return the choices nearest to the propagated seeds, each operation in its fastest way."""
        # Axes cut a dimension in the order of the mesh, as candidates have them.
        laid = tuple(sorted(seeds, key=lambda seed: (self.mesh.axis_names.index(seed.axis), seed)))
        if laid not in self._begun:
            propagated = propagate_by_rules(self.graph, self._annotate(laid), strategy="aggressive")
            self._begun[laid] = self._choose_ways(self._find_nearest(propagated.values))
        return self._begun[laid]

    def with_inputs(self, chosen: Choices, specs: Mapping[int, ShardingSpec]) -> Choices:
        """Return choices with inputs nearest to shardings, each operation in its fastest way."""
        shardings: list[Sharding] = self.problem.shardings(chosen)
        for number, spec in specs.items():
            shardings[number] = self.table.encoded(spec).plain
        return self._choose_ways(self.problem.nearest(shardings))

    def _choose_ways(self, start: Choices) -> Choices:
        return self.total.descended(start, self._ways, sweeps=0)

    def _find_nearest(self, specs: Sequence[ShardingSpec | None]) -> Choices:
        """Return the choices nearest to shardings of all values."""
        return self.problem.nearest(
            [
                Sharding.whole(len(value.shape)) if spec is None else self.table.encoded(spec).plain
                for spec, value in zip(specs, self.graph.values, strict=True)
            ]
        )


def _find_alike(graph: Graph) -> list[int]:
    """Number the operations; equal ones between equal neighbours have the same number."""
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for place, operation in enumerate(graph.operations):
        makers.update(dict.fromkeys(operation.results, place))
        for number in operation.operands:
            readers.setdefault(number, []).append(place)
    labels = _number((operation.operator, operation.rule) for operation in graph.operations)
    return _number(
        (
            labels[place],
            *[
                labels[makers[number]] if number in makers else None
                for number in operation.operands
            ],
            *[
                tuple(sorted(labels[n] for n in readers.get(number, ())))
                for number in operation.results
            ],
        )
        for place, operation in enumerate(graph.operations)
    )


def _number(items: Iterable[object]) -> list[int]:
    """Number objects; equal objects have the same number."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(item, len(numbers)) for item in items]


# Axes that are data or tensor parallel in all combinations; further axes are as the last of them.
MAX_AXES = 3
# The computation that counts as the minimum, relative to it; and the fraction of the bytes of all
# weights that may stay replicated.
COMPUTE_TOLERANCE = 1.1
SMALL_WEIGHTS = 0.01


class InputLayout(NamedTuple):
    """A sharding of each free input.

    Args:
        specs: the shardings.
        chosen: choices of all variables of the search near these.
        seconds_s: the approximate time of the function.
        size_bytes: the size of all these inputs on a rank.
    """

    specs: tuple[ShardingSpec, ...]
    chosen: Choices
    seconds_s: float
    size_bytes: float


def candidate_layouts(search: InputSearch) -> list[InputLayout]:
    """Return layouts for data, fully sharded and tensor parallelism by axis, the fastest first."""
    batch = _find_batch(search)
    weights = _list_weights(search, batch)
    cut = [number for kind in (*batch, *weights) for number in search.kinds[kind]]
    # The dimensions of the largest weights.
    ndim = len(search.graph.values[search.kinds[weights[0]][0]].shape) if weights else 1
    layouts: dict[tuple[ShardingSpec, ...], InputLayout] = {}
    for data in _list_data_axes(search):
        begun: list[Seed] = []
        for axis in data:
            # The fastest sharding of the batch along the axis, in addition to the others.
            axis_seeds = [seed for seed in search.list_seeds(axis) if seed.kind in batch]
            judged = {seed: search.total.value(search.begin([*begun, seed])) for seed in axis_seeds}
            if judged:
                begun.append(min(judged, key=judged.__getitem__))
        tensor = [axis for axis in search.mesh.axis_names if axis not in data]
        for dim in range(ndim) if tensor else [0]:
            seeds = begun
            for axis in tensor:
                seeds = _cut_weights(search, seeds, weights, axis, dim)
            fully = [
                subset for n in range(len(data) + 1) for subset in itertools.combinations(data, n)
            ]
            for axes in (*fully, search.mesh.axis_names):
                layout = _shard_fully(search, seeds, cut, axes)
                layouts.setdefault(layout.specs, layout)
    return sorted(layouts.values(), key=lambda layout: (layout.seconds_s, layout.size_bytes))


def _list_data_axes(search: InputSearch) -> list[list[str]]:
    """Return which axes may be data parallel, while the others are tensor parallel.

    Among axes of equal size the first are, because neighbours are tensor parallel.
    """
    names, size_of = search.mesh.axis_names, search.mesh.axis_size
    data_axes = []
    for is_data in itertools.product((True, False), repeat=min(len(names), MAX_AXES)):
        last = [is_data[-1]] * (len(names) - len(is_data))
        is_data_axis = dict(zip(names, (*is_data, *last), strict=True))
        pairs = itertools.combinations(names, 2)
        if all(
            is_data_axis[a] or not is_data_axis[b] or size_of(a) != size_of(b) for a, b in pairs
        ):
            data_axes.append([axis for axis in names if is_data_axis[axis]])
    return data_axes


def _list_weights(search: InputSearch, batch: Collection[int]) -> list[int]:
    """Return the kinds of inputs that are not the batch, except small ones such as norms."""
    kinds = [kind for kind in range(len(search.kinds)) if kind not in batch]
    sizes = [sum(float(search.sizes_bytes[n].max()) for n in search.kinds[kind]) for kind in kinds]
    few_bytes = sum(sizes) * SMALL_WEIGHTS
    return [kind for place, kind in enumerate(kinds) if sum(sizes[place:]) > few_bytes]


def _find_batch(search: InputSearch) -> list[int]:
    """Return the kinds of inputs that are the batch."""
    axis = max(search.mesh.axis_names, key=search.mesh.axis_size)
    begun = [search.begin([seed]) for seed in search.list_seeds(axis)]
    if not begun:
        return []
    computing_s = list(map(search.problem.computing_s, begun))
    most_s = min(computing_s) * COMPUTE_TOLERANCE
    few = [
        choices
        for choices, seconds_s in zip(begun, computing_s, strict=True)
        if seconds_s <= most_s
    ]
    best = min(few, key=search.total.value)
    return [kind for kind in range(len(search.kinds)) if _is_cut(search, best, kind, axis)]


def _is_cut(search: InputSearch, chosen: Choices, kind: int, axis: str) -> bool:
    number, place = search.kinds[kind][0], search.mesh.axis_names.index(axis)
    sharding = search.problem.values[number][chosen[number]]
    return any(part[0] == place for dim in sharding.dims for part in dim)


def _cut_weights(
    search: InputSearch, seeds: Sequence[Seed], weights: Sequence[int], axis: str, dim: int
) -> list[Seed]:
    """Add shardings of weights along an axis to seeds.

    The largest weights are cut along a dimension if they can be, since that decides most of what
    can be saved by the others.
    """
    extended = list(seeds)
    axis_seeds = search.list_seeds(axis)
    for place, kind in enumerate(weights):
        waiting = [seed for seed in axis_seeds if seed.kind == kind]
        if place == 0:
            waiting = [seed for seed in waiting if seed.dim == dim] or waiting
        if waiting and not _is_cut(search, search.begin(extended), kind, axis):
            best = min(
                waiting, key=lambda seed: search.total.value(search.begin([*extended, seed]))
            )
            extended.append(best)
    return extended


def _shard_fully(
    search: InputSearch, seeds: Sequence[Seed], cut: Collection[int], axes: Sequence[str]
) -> InputLayout:
    """Return the layout of seeds, with inputs cut over axes as well that do not cut them so far.

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
    """Return a sharding with each unused axis added, to a dimension without axes if possible."""
    mesh, shape = search.mesh, search.graph.values[number].shape
    dims = [[str(axis) for axis in dim.axes] for dim in spec.dim_specs]
    used = {axis.name for dim in spec.dim_specs for axis in dim.axes}
    for axis in axes:
        cuts = [mesh.joint_size(names) for names in dims]
        size = mesh.axis_size(axis)
        fits = [n for n, length in enumerate(shape) if length % (cuts[n] * size) == 0]
        if axis not in used and fits:
            dims[min(fits, key=cuts.__getitem__)].append(axis)
    return ShardingSpec(mesh, [sorted(names, key=mesh.axis_names.index) for names in dims])


# Partial choices that are expanded.
MAX_EXPANSIONS = 2048
# Sums are compared up to this fraction, which is far above rounding errors.
SLACK = 1e-9


def optimal_inputs(
    search: InputSearch,
    judge: Callable[[tuple[int, ...]], float],
    best_s: float,
    limit: float,
) -> bool:
    """Evaluate all choices of inputs that may be the fastest; return whether none is left.

    Args:
        search: of the graph.
        judge: the seconds of the program with choices of all free inputs, infinite where it holds
            more than the limit.
        best_s: the seconds of the best program known.
        limit: the most bytes that all inputs together may have on a rank.
    """
    problem, free = search.problem, search.free
    problem.fill(bounds=True)
    sizes = [search.sizes_bytes[number] for number in free]
    # The least that inputs from each place on take.
    least_bytes = [
        sum(float(input_sizes.min()) for input_sizes in sizes[place:])
        for place in range(len(free) + 1)
    ]
    # The bound of each partial choice, its order among equals, and the choices.
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    count = 1
    for _ in range(MAX_EXPANSIONS):
        if not waiting or waiting[0][0] >= best_s * (1 - SLACK):
            return True
        bound_s, place, chosen = heapq.heappop(waiting)
        allowed = [np.arange(choices) for choices in search.total.choices]
        for number, choice in zip(free, chosen, strict=False):
            allowed[number] = np.array([choice])
        total = problem.sum(NOTHING, {}).restricted(allowed)
        places = total.eliminated()
        if places is None:
            return False
        answer = tuple(int(choices[at]) for choices, at in zip(allowed, places, strict=True))
        has_risen = problem.price([answer])
        least_s = max(bound_s, total.value(places))
        if has_risen or least_s > bound_s * (1 + SLACK):
            # With its movements priced it may not be the least any more.
            heapq.heappush(waiting, (least_s, place, chosen))
            continue
        if len(chosen) == len(free):
            best_s = min(best_s, judge(chosen))
            continue
        bounds_s = total.least_of_choices()
        if bounds_s is None:
            return False
        held_bytes = sum(
            float(input_sizes[at]) for input_sizes, at in zip(sizes, chosen, strict=False)
        )
        for choice, choice_s in enumerate(bounds_s[free[len(chosen)]]):
            size_bytes = held_bytes + float(sizes[len(chosen)][choice])
            if size_bytes + least_bytes[len(chosen) + 1] <= limit:
                # Sums are found up to rounding.
                partial = (float(choice_s) * (1 - SLACK), count, (*chosen, choice))
                heapq.heappush(waiting, partial)
                count += 1
    return False
