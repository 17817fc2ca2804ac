"""Propagation by rules: inference of shardings from those of a few values.

A user annotates some values with shardings. Propagation extends them over operators, forwards from
operands to results, backwards and sideways, until nothing changes:

1. for each user priority, lowest first: dimensions of that priority take part; those of higher
   ones are empty and closed until then, and no other dimension takes their axes;
2. for each stage of operator priority: operators whose data passes through unchanged come before
   products and reductions, and those before broadcasts;
3. each operator whose values changed is evaluated again: its rule propagates shardings between
   its tensors (`axes`), and a strategy resolves conflicts (`merging`).

    x [{a}, {}]      x @ w : [{a, ?}, {b, ?}]      exp(x @ w) : [{a, ?}, {b, ?}]
    w [{}, {b}]

If values still conflict, each keeps its sharding: `explicit_reshards` lists the reshards.

The stages and the order of operators are those of Shardy (OpenXLA), so conflicts are resolved in
the same way. Strategy "cost" resolves them by estimated time: see `cost_propagation`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from reshard._validation import check_type
from reshard.errors import SpecError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.operator import OperatorClass
from reshard.spmd.graph import Graph, Operation, identity_rule
from reshard.spmd.propagation.axes import AxisTable, Parts, Sharding, collected, updated
from reshard.spmd.propagation.merging import (
    ANY_STAGE,
    STAGES,
    STRATEGIES,
    Direction,
    OperatorTensors,
    Strategy,
    class_of,
    directions,
)
from reshard.spmd.rules.sharding_rule import OpShardingRule

Known = Sequence[ShardingSpec | None]
"""Shardings by the number of their value; None if unknown."""


OperationShardings = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]
"""The shardings of an operation's operands and results while it runs."""


@dataclass(frozen=True, slots=True)
class PropagatedGraph:
    """The result of a propagation: a graph, and a sharding of each value, which may be open.

    `assign_shardings` closes these shardings and enters them in the graph.

    Args:
        graph: the function.
        mesh: of all shardings; None if there are none.
        values: a sharding per value, or None: propagation did not reach it, and it is replicated.
        outputs: the same for the function's outputs, which may differ from the values'.
        runs: for each operation, the shardings of its operands while it runs, and those of its
            results right after it; None if the strategy leaves that to `explicit_reshards`.
        annotated: the values whose shardings were given.
        seconds_s: by cost, the estimated time of all operations and movements, in sequence.
        is_exact: by cost, whether no choice among the candidates takes less time, each movement
            priced by its program.
        others_s: by cost, the time with the shardings of other strategies, each operation run in
            the way that suits these best.
    """

    graph: Graph
    mesh: DeviceMesh | None
    values: tuple[ShardingSpec | None, ...]
    outputs: tuple[ShardingSpec | None, ...]
    runs: tuple[OperationShardings, ...] | None = None
    annotated: frozenset[int] = frozenset()
    seconds_s: float | None = None
    is_exact: bool = False
    others_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def propagated(self) -> PropagatedGraph:
        """The same graph, as other strategies return it."""
        return self

    def __str__(self) -> str:
        names = [str(value) for value in self.graph.values]
        width = max(map(len, names), default=0)
        lines = [
            f"{name:{width}}  {'-' if spec is None else spec}"
            for name, spec in zip(names, self.values, strict=True)
        ]
        outputs = ("-" if spec is None else str(spec) for spec in self.outputs)
        return "\n".join([*lines, f"return  {' ;  '.join(outputs)}"])


def propagate(
    rule: OpShardingRule,
    operands: Known,
    results: Known,
    *,
    strategy: str = "aggressive",
    direction: Direction = Direction.BOTH,
    is_elementwise: bool | None = None,
    max_priority: int | None = None,
) -> tuple[tuple[ShardingSpec | None, ...], tuple[ShardingSpec | None, ...]]:
    """Propagate shardings between the operands and results of an operator, in a single step.

    Dimensions of higher priority numbers participate after those of lower ones, as in a graph.

    Args:
        rule: of the operator.
        operands, results: their known shardings, None for unknown ones.
        strategy: "basic", "prioritized", "aggressive" or "widest".
        direction: in which to propagate.
        is_elementwise: whether the operator is elementwise; derived from its rule when not given.
        max_priority: dimensions of a higher priority number keep their sharding and propagate
            nothing; None for all dimensions.

    Raises:
        SpecError: shardings of several meshes, or with another number of dimensions; an unknown
            strategy.

    >>> from reshard import DeviceMesh, spec
    >>> rule = OpShardingRule.parse("([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}")
    >>> mesh = DeviceMesh.of(a=2, b=2)
    >>> propagate(rule, [spec(mesh, "a, -"), spec(mesh, "-, b")], [None])[1]
    (ShardingSpec(DeviceMesh(a=2,b=2), 'a ?, b ?'),)
    """
    merge = merge_of(strategy)
    check_type(rule, OpShardingRule, "rule", "give OpShardingRule.parse(text)", SpecError)
    all_specs = [*operands, *results]
    for spec in all_specs:
        _check_sharding(spec)
    mesh = _find_mesh(all_specs)
    _check_ranks(all_specs, rule)
    if mesh is None:
        return tuple(operands), tuple(results)
    table = AxisTable.of(mesh)
    shardings = [None if spec is None else table.encoded(spec) for spec in all_specs]
    # Without an operator's name its class follows from the rule alone.
    kind = class_of("", rule) if is_elementwise is None else OperatorClass(int(is_elementwise))
    ways = tuple(
        Direction.NONE if factor in rule.blocked else direction for factor in range(len(rule.sizes))
    )
    state = [
        None if sharding is None else waiting(sharding, priorities_of(spec))
        for spec, sharding in zip(all_specs, shardings, strict=True)
    ]
    for level in (0, *levels_of(all_specs)):
        if level:
            state = [
                None
                if now is None
                else now
                if user is None
                else joined(now, user, priorities_of(spec), level)
                for now, user, spec in zip(state, shardings, all_specs, strict=True)
            ]
        if max_priority is not None and level > max_priority:
            continue
        operator = Carrying(rule, ways, kind.is_elementwise)
        for place, new in carried(operator, table, tuple(state), merge):
            state[place] = new
    specs = [
        spec if new == old or new is None else table.decoded(new, priorities_of(spec))
        for spec, old, new in zip(all_specs, shardings, state, strict=True)
    ]
    return tuple(specs[: len(operands)]), tuple(specs[len(operands) :])


def propagate_by_rules(
    graph: Graph,
    annotations: Mapping[int, ShardingSpec],
    *,
    outputs: Mapping[int, ShardingSpec] | None = None,
    strategy: str = "aggressive",
    operator_priorities: bool = True,
    user_priorities: bool = True,
) -> PropagatedGraph:
    """Infer the shardings of all values of a graph by any strategy but "cost".

    Arguments and errors are those of `propagate_graph`, which has the strategy "cost" as well.
    """
    merge = merge_of(strategy)
    check_type(graph, Graph, "graph", "give Graph.parse(text), or sp.trace(f, x).graph", SpecError)
    # 1. Read and check what is given.
    output_specs = _read_mapping(outputs or {}, "outputs")
    annotations = _read_mapping(annotations, "annotations")
    _check_annotations(graph, annotations, output_specs)
    mesh = _find_mesh([*annotations.values(), *output_specs.values()])
    nothing = (None,) * len(graph.values)
    if mesh is None:
        return PropagatedGraph(graph, None, nothing, (None,) * len(graph.outputs))
    # 2. Number the shardings. Outputs have negative places, so that values keep their numbers.
    run = _Propagation(graph, AxisTable.of(mesh), merge)
    places = {number: run.interned(spec) for number, spec in annotations.items()}
    places |= {-1 - place: run.interned(spec) for place, spec in output_specs.items()}
    specs = {**annotations, **{-1 - place: spec for place, spec in output_specs.items()}}
    levels = levels_of(specs.values()) if user_priorities else []
    for place, sharding in places.items():
        run.state[place] = sharding
        if levels:
            reserved = waiting(run.shardings[sharding], priorities_of(specs[place]))
            run.state[place] = run.number(reserved)
    # 3. For each user priority, and in it each stage of operators: carry until nothing changes.
    stages = range(STAGES) if operator_priorities else [ANY_STAGE]
    for level in [0, *levels]:
        if level:
            for place, spec in specs.items():
                if level in priorities_of(spec):
                    run.join(place, places[place], priorities_of(spec), level)
        for stage in stages:
            run.settle(stage)
    return replace(run.answer(), annotated=frozenset(annotations))


def merge_of(strategy: str) -> Strategy:
    """Return the strategy of a name. Raises SpecError if it is unknown."""
    if strategy not in STRATEGIES:
        raise SpecError(
            f"unknown strategy {strategy!r}; it is one of {', '.join(STRATEGIES)}, and cost for a "
            "graph"
        )
    return STRATEGIES[strategy]


def priorities_of(spec: ShardingSpec | None) -> tuple[int, ...]:
    """Return the priorities of a sharding's dimensions."""
    return () if spec is None else tuple(dim.priority for dim in spec.dim_specs)


def levels_of(specs: Iterable[ShardingSpec | None]) -> list[int]:
    """Return the priorities of any dimension, but for the first, in order."""
    return sorted({priority for spec in specs for priority in priorities_of(spec) if priority})


def waiting(sharding: Sharding, priorities: Sequence[int]) -> Sharding:
    """Return the sharding without its dimensions of higher priorities, whose axes are reserved."""
    # Reserved axes are entered as replicated, which keeps propagation from using them elsewhere.
    later = [place for place, priority in enumerate(priorities) if priority]
    if not later:
        return sharding
    reserved = [part for place in later for part in sharding.dims[place]]
    return sharding._replace(
        dims=tuple(() if place in later else axes for place, axes in enumerate(sharding.dims)),
        is_closed=tuple(
            place in later or closed for place, closed in enumerate(sharding.is_closed)
        ),
        replicated=tuple(sorted((*sharding.replicated, *reserved))),
        waiting=tuple(later),
    )


def joined(now: Sharding, user: Sharding, priorities: Sequence[int], level: int) -> Sharding:
    """Return the sharding with those dimensions of the user's that have the priority `level`."""
    joining = [dim for dim, priority in enumerate(priorities) if priority == level]
    freed = {part for dim in joining for part in user.dims[dim]}
    sources = [user if dim in joining else now for dim in range(len(now.dims))]
    return now._replace(
        dims=tuple(source.dims[dim] for dim, source in enumerate(sources)),
        is_closed=tuple(source.is_closed[dim] for dim, source in enumerate(sources)),
        replicated=tuple(part for part in now.replicated if part not in freed),
        waiting=tuple(dim for dim in now.waiting if dim not in joining),
    )


@lru_cache(maxsize=4096)
def carriers_of(rule: OpShardingRule) -> frozenset[int]:
    """Return the factors that carry levels with a cut rule: pointwise factors.

    >>> sorted(carriers_of(OpShardingRule.parse("([ij], [k]) -> ([i, j, k]) {i=2, j=4, k=8}")))
    [2]
    """
    special = {*rule.reduction, *rule.need_replication, *rule.permutation}
    special |= {f for mapping in rule.tensors for dim in mapping if len(dim) > 1 for f in dim}
    return frozenset(range(len(rule.sizes))) - special


class Carrying(NamedTuple):
    """How an operator carries shardings between its tensors: in which ways along each factor."""

    rule: OpShardingRule
    ways: tuple[Direction, ...]
    is_elementwise: bool


@lru_cache(maxsize=1 << 14)
def carried(
    operator: Carrying,
    table: AxisTable,
    shardings: tuple[Sharding | None, ...],
    merge: Strategy,
) -> tuple[tuple[int, Sharding], ...]:
    """Return the places of an operator's tensors whose shardings change, and the new shardings."""
    rule = operator.rule
    carriers = carriers_of(rule)
    mappings = rule.tensors
    factors = [
        collected(mapping, rule.sizes, sharding, carriers)
        for mapping, sharding in zip(mappings, shardings, strict=True)
    ]
    excluded: list[Parts] = [
        () if sharding is None else sharding.replicated + sharding.partial for sharding in shardings
    ]
    tensors = OperatorTensors(rule, table, factors, excluded, operator.is_elementwise)
    merge(tensors, operator.ways)
    changes: list[tuple[int, Sharding]] = []
    for number in sorted(tensors.changed):
        old = shardings[number]
        new = updated(mappings[number], rule.sizes, factors[number], old)
        # A tensor without a sharding stays so as long as no axis shards it.
        if new != old and (old is not None or new.is_cut):
            changes.append((number, new))
    return tuple(changes)


def _find_mesh(specs: Sequence[ShardingSpec | None]) -> DeviceMesh | None:
    meshes = list(dict.fromkeys(spec.mesh for spec in specs if spec is not None))
    if len(meshes) > 1:
        raise SpecError(
            f"shardings over {meshes[0]!r} and over {meshes[1]!r} in one propagation; give all of "
            "them over one mesh"
        )
    return meshes[0] if meshes else None


def _check_ranks(specs: Known, rule: OpShardingRule) -> None:
    if len(specs) != len(rule.tensors):
        raise SpecError(f"{len(specs)} shardings for the {len(rule.tensors)} tensors of {rule}")
    for spec, mapping in zip(specs, rule.tensors, strict=True):
        if spec is not None and spec.ndim != len(mapping):
            raise SpecError(
                f"`{spec}` is for {spec.ndim} dimensions, but the tensor has {len(mapping)} in "
                f"{rule}"
            )


def _read_mapping(specs: object, name: str) -> dict[int, ShardingSpec]:
    if not isinstance(specs, Mapping):
        raise SpecError(f"{name} {specs!r} must be shardings by number; give {{0: spec, ...}}")
    return dict(specs)


def _check_sharding(spec: object) -> None:
    if spec is not None:
        check_type(spec, ShardingSpec, "sharding", "give reshard.spec(mesh, 'x, -')", SpecError)


def _check_annotations(
    graph: Graph, annotations: Mapping[int, ShardingSpec], outputs: Mapping[int, ShardingSpec]
) -> None:
    for key, spec in itertools.chain(annotations.items(), outputs.items()):
        if not isinstance(key, int) or spec is None:
            raise SpecError(
                f"{key!r}: {spec!r} must be a sharding by number; give {{0: spec, ...}}"
            )
        _check_sharding(spec)
    for number, spec in annotations.items():
        if not 0 <= number < len(graph.values):
            raise SpecError(
                f"`{spec}` is for value %{number}; the graph has %0 to %{len(graph.values) - 1}"
            )
        _check_rank(spec, graph, number)
    for place, spec in outputs.items():
        if not 0 <= place < len(graph.outputs):
            raise SpecError(
                f"`{spec}` is for output {place}; the graph has {len(graph.outputs)}, from 0 on"
            )
        _check_rank(spec, graph, graph.outputs[place])


def _check_rank(spec: ShardingSpec, graph: Graph, number: int) -> None:
    if spec.ndim != len(graph.values[number].shape):
        raise SpecError(
            f"`{spec}` is for {spec.ndim} dimensions, but the value is {graph.values[number]}"
        )


class _Propagation:
    """One propagation over a graph.

    Shardings have numbers here, so that updates are looked up when they repeat, as in the equal
    layers of a model. `state` has the number of each value's sharding, and under
    -1, -2 and so on those of the outputs; None if a value is not sharded yet.
    """

    def __init__(self, graph: Graph, table: AxisTable, merge: Strategy) -> None:
        self.graph = graph
        self.table = table
        self.merge = merge
        self.state: dict[int, int | None] = dict.fromkeys(range(-len(graph.outputs), 0))
        self.state |= dict.fromkeys(range(len(graph.values)))
        self.shardings: list[Sharding] = []
        self._numbers: dict[Sharding, int] = {}
        # The changes, by how the operation propagates and the numbers of its tensors' shardings.
        self._answers: dict[tuple[int | None, ...], tuple[tuple[int, int], ...]] = {}
        self._carrying: dict[Carrying, int] = {}
        self._kinds: dict[tuple[OpShardingRule, OperatorClass, bool], int] = {}
        self._maker: dict[int, int] = {}
        self._users: list[list[int]] = [[] for _ in graph.values]
        self._tensors = [
            (*operation.operands, *operation.results) for operation in graph.operations
        ]
        # How often each value is used decides where an operator propagates to, see `_number_kind`.
        uses = [0] * len(graph.values)
        for number, operation in enumerate(graph.operations):
            for result in operation.results:
                self._maker[result] = number
            for operand in operation.operands:
                uses[operand] += 1
                if number not in self._users[operand]:
                    self._users[operand].append(number)
        for output in graph.outputs:
            uses[output] += 1
        self._kind_of = [self._number_kind(operation, uses) for operation in graph.operations]
        self._kind_list = list(self._kinds)
        # The order in which a change puts operators on the stack of `_sweep`, from which the last
        # operator is taken first: the maker, then users from the last on.
        self._neighbours = [
            ([self._maker[value]] if value in self._maker else []) + self._users[value][::-1]
            for value in range(len(graph.values))
        ]

    def _number_kind(self, operation: Operation, uses: Sequence[int]) -> int:
        # Scalars do not count: there is nothing in them to cut.
        is_shared = any(
            uses[operand] > 1 and self.graph.values[operand].shape for operand in operation.operands
        )
        kind = class_of(operation.operator, operation.rule)
        return self._kinds.setdefault((operation.rule, kind, is_shared), len(self._kinds))

    def number(self, sharding: Sharding) -> int:
        """Return the number of a sharding."""
        index = self._numbers.setdefault(sharding, len(self.shardings))
        if index == len(self.shardings):
            self.shardings.append(sharding)
        return index

    def interned(self, spec: ShardingSpec) -> int:
        """Return the number of a user's sharding."""
        return self.number(self.table.encoded(spec))

    def join(self, place: int, user_number: int, priorities: Sequence[int], level: int) -> None:
        """Give a value its dimensions of the priority `level`."""
        current = self.state[place]
        if current is not None:
            now, user = self.shardings[current], self.shardings[user_number]
            self.state[place] = self.number(joined(now, user, priorities, level))

    def settle(self, stage: int) -> None:
        """Update operators with the directions of a stage, again when a value of theirs changes.

        An operator that changed a value itself is not asked again for that: an answer leaves
        nothing to add, except if two of its operands are the same value.
        """
        # Before the sweep, values get what is requested of outputs; after it, outputs get what the
        # values have become.
        self._meet_outputs()
        self._sweep(stage)
        self._meet_outputs()

    def _sweep(self, stage: int) -> None:
        count = len(self.graph.operations)
        # A stack, the first operation on top; what a change wakes up is asked before the rest.
        waiting = list(range(count - 1, -1, -1))
        is_waiting = [True] * count
        state, answers, tensors = self.state, self._answers, self._tensors
        carrying = [
            Carrying(rule, directions(rule, kind, is_shared, stage), kind.is_elementwise)
            for rule, kind, is_shared in self._kind_list
        ]
        numbers = [self._carrying.setdefault(entry, len(self._carrying)) for entry in carrying]
        while waiting:
            current = waiting.pop()
            is_waiting[current] = False
            places = tensors[current]
            kind = self._kind_of[current]
            # Numbers are compared faster than shardings, and layers of a model repeat them.
            key = (numbers[kind], *[state[place] for place in places])
            changes = answers.get(key)
            if changes is None:
                changes = answers[key] = self._find_changes(carrying[kind], places)
            for tensor, new in changes:
                value = places[tensor]
                state[value] = new
                for neighbour in self._neighbours[value]:
                    if neighbour != current and not is_waiting[neighbour]:
                        is_waiting[neighbour] = True
                        waiting.append(neighbour)

    def _find_changes(
        self, carrying: Carrying, places: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        numbers = [self.state[place] for place in places]
        shardings = tuple(
            [None if number is None else self.shardings[number] for number in numbers]
        )
        if all(sharding is None for sharding in shardings):
            return ()
        changes = carried(carrying, self.table, shardings, self.merge)
        return tuple([(tensor, self.number(new)) for tensor, new in changes])

    def _meet_outputs(self) -> None:
        """Propagate between the outputs and their values, as through an identity."""
        for position, value in enumerate(self.graph.outputs):
            ndim = len(self.graph.values[value].shape)
            if not ndim:
                continue
            places = (value, -1 - position)
            rule = identity_rule(self.graph.values[value].shape)
            ways = (Direction.BOTH,) * ndim
            for tensor, new in self._find_changes(Carrying(rule, ways, False), places):
                self.state[places[tensor]] = new

    def answer(self) -> PropagatedGraph:
        """Return the graph with the shardings that propagation found."""
        decoded = [
            None if number is None else self.table.decoded(self.shardings[number])
            for number in (self.state[place] for place in range(len(self.graph.values)))
        ]
        outputs = [
            None if number is None else self.table.decoded(self.shardings[number])
            for number in (self.state[-1 - place] for place in range(len(self.graph.outputs)))
        ]
        return PropagatedGraph(self.graph, self.table.mesh, tuple(decoded), tuple(outputs))
