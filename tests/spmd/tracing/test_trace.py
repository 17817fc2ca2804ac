"""A trace says what running does: types, bytes and memory, for every strategy."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.collectives.steps import AllReduce, Exchange, Permute, ReduceScatter, Step
from reshard.cost import load_preset
from reshard.errors import MeshError, ShardError, SpecError, UsageError
from reshard.layout import Box, Layout
from reshard.plans.plan import Plan
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.core.array_type import replicated
from reshard.spmd.core.backend import library
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator
from reshard.spmd.graph import WITH_SHARDING, Graph
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.spmd.shards.runner import InProcess
from reshard.spmd.shards.shard_copies import Movement, Shards
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.estimates import InsertedReshard
from reshard.topology import Link, Topology
from spmd.eager_cases import ONE_OPERAND, TWO_OPERANDS, Case, specs
from spmd.traced_functions import FUNCTIONS, MESH, Traced

STRATEGIES = ("eager", "basic", "aggressive", "widest", "cost")
ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "traces"
NEED_ELEMENTS = {"mask", "nonzero", "unique_counts"}

every_function = pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def flat(value: Any) -> list[Any]:
    return [leaf for _, leaf in leaves(value)]


def box_of(layout: Layout, rank: int) -> Box | None:
    boxes = layout.boxes(rank)
    return boxes[0] if boxes else None


def volume_of_both(one: Box | None, other: Box | None) -> int:
    if one is None or other is None:
        return 0
    ends = zip(one.start, one.stop, other.start, other.stop, strict=True)
    return math.prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in ends)


def received(step: Step) -> int:
    """Elements that must arrive in a step, counted box by box without any plan.

    An exchange that combines contributions is counted by the boxes that it copies.
    """
    before, after = step.source_layout, step.target_layout
    if isinstance(step, Exchange) and before.contributions * after.contributions > 1:
        return int(Plan(before, after).transfers.moving.elements.sum())
    total = 0
    for group in step.groups:
        for place, rank in enumerate(group):
            box = box_of(after, rank)
            wanted = 0 if box is None else box.elements
            if isinstance(step, AllReduce):
                mine = wanted * (place + 1) // len(group) - wanted * place // len(group)
                total += (len(group) - 1) * mine + wanted - mine
            elif isinstance(step, ReduceScatter):
                total += (len(group) - 1) * wanted
            elif isinstance(step, Permute):
                total += 0 if box == box_of(before, rank) else wanted
            else:
                for one in after.boxes(rank):
                    total += one.elements - sum(
                        volume_of_both(one, other) for other in before.boxes(rank)
                    )
    return total


class Counting(InProcess):
    """Moves by the steps of the chosen program, and counts what arrives."""

    def __init__(self) -> None:
        super().__init__(library("numpy"))
        self.moved_bytes = 0

    def _make_movement(self, source: sp.ArrayType, spec: ShardingSpec, plan: Plan) -> Movement:
        program = chosen_program(source, spec)
        ranks = self.ranks(spec.mesh)
        size_bytes = sum(map(received, program.steps)) * source.dtype.itemsize_bytes

        def moved(shards: Shards) -> Shards:
            held = dict(zip(ranks, shards, strict=True))
            for step in program.steps:
                held = step.run(held)
            self.moved_bytes += size_bytes
            return tuple(held[rank] for rank in ranks)

        return moved


@every_strategy
@every_function
def test_running_moves_what_was_said_and_gives_the_dense_result(
    case: Traced, strategy: str
) -> None:
    traced = sp.trace(case.function, *case.types(), strategy=strategy)
    counting = Counting()
    found = flat(traced.run(*case.arrays(), runner=counting))
    assert counting.moved_bytes == traced.moved_bytes
    assert [one.type for one in found] == list(traced.outputs)
    dense = [sp.array(one) for one in case.arrays()]
    with sp.running(sp.in_process()):
        expected = flat(dense_result(case, dense))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-12, 1e-12)


def dense_result(case: Traced, arrays: list[sp.ShardedArray]) -> Any:
    """The function of arrays none of which is sharded: the dense computation."""
    return case.function(*arrays)


@every_function
def test_eager_traces_are_what_eager_arrays_do(case: Traced) -> None:
    traced = sp.trace(case.function, *case.types())
    counting = Counting()
    with sp.running(counting):
        arrays = [
            sp.array(data, kind.spec)
            for data, kind in zip(case.arrays(), case.types(), strict=True)
        ]
        found = flat(case.function(*arrays))
    assert [one.type for one in found] == list(traced.outputs)
    assert counting.moved_bytes == traced.moved_bytes


@pytest.mark.parametrize("turn", range(3))
def test_every_operation_is_traced_as_it_runs(turn: int) -> None:
    cases: list[Case] = [*ONE_OPERAND, *TWO_OPERANDS]
    for number, case in enumerate(cases):
        arrays = case.arrays()
        choices = list(itertools.product(*(list(specs(MESH, one.ndim)) for one in arrays)))
        given = choices[(7 * number + 5 * turn + 1) % len(choices)]
        operands = [sp.array(one, at) for one, at in zip(arrays, given, strict=True)]

        def function(*arrays: Any, case: Case = case) -> Any:
            return [x for x in flat(case.function(sp, *arrays)) if isinstance(x, sp.ShardedArray)]

        if case.name in NEED_ELEMENTS:
            with pytest.raises(UsageError, match="elements"):
                sp.trace(function, *operands)
            continue
        with np.errstate(all="ignore"):
            expected = [one.type for one in function(*operands)]
        assert list(sp.trace(function, *operands).outputs) == expected, case.name


def held_bytes(kind: sp.ArrayType, rank: int) -> int:
    shape = kind.shape if kind.spec is None else kind.layout.local_shape(rank) or ()
    return math.prod(shape) * kind.dtype.itemsize_bytes


def needed_bytes(reshard: InsertedReshard, rank: int) -> int:
    """The most that a rank holds beyond both ends of a program, found step by step."""
    steps, most = reshard.program.steps, 0
    for number, step in enumerate(steps):
        here = 0
        if number > 0:
            here += math.prod(step.source_layout.local_shape(rank) or ())
        if number + 1 < len(steps):
            here += math.prod(step.target_layout.local_shape(rank) or ())
        if not isinstance(step, Permute):
            here += int(step.sent_elements[rank]) + int(step.received_elements[rank])
        most = max(most, here)
    return most * reshard.source.dtype.itemsize_bytes


class Held:
    """An array of a simulation: its memory, by identity, and what it was moved to."""

    def __init__(self, kind: Any, memory: object = None, number: int = -1) -> None:
        self.kind, self.number = kind, number
        self.memory = object() if memory is None else memory
        self.moved: dict[ShardingSpec, Held] = {}


def simulate(traced: sp.Trace, rank: int, last_reads: dict[int, int]) -> list[int]:
    """The bytes of all memory that somebody holds before each operation, by who holds what.

    `last_reads` has where moved arrays are read last, by the number of the movement; what is found
    in one simulation is for the next.
    """
    graph, found, count = traced.graph, [], itertools.count()
    held = {
        number: Held(kind)
        for number, kind in zip(graph.inputs, traced.inputs, strict=True)
        if kind is not None
    }
    for place, one in enumerate(traced.operations):
        moved = [x for array in held.values() for x in array.moved.values()]
        arrays = [*held.values(), *(x for x in moved if last_reads.get(x.number, -1) >= place)]
        memories = {array.memory: held_bytes(array.kind, rank) for array in arrays}
        found.append(sum(memories.values()))
        is_laid_out = one.operation.operator == WITH_SHARDING
        there: Held | None = None
        steps = [(x, False) for x in one.before] + [(x, True) for x in one.reused]
        for reshard, is_known in steps + [(x, False) for x in one.after if is_laid_out]:
            array = held[one.operation.operands[0] if is_laid_out else reshard.value]
            if is_known:
                there = array.moved[reshard.target]
                last_reads[there.number] = max(place, last_reads.get(there.number, place))
                continue
            there = Held(reshard.source.with_spec(reshard.target), number=next(count))
            if reshard.source is array.kind:
                array.moved[reshard.target] = there
        if is_laid_out:
            (result,), kind = one.operation.results, one.results[0]
            array = held[one.operation.operands[0]]
            is_same = there is None and array.kind is kind
            held[result] = array if is_same else Held(kind, (there or array).memory)
        else:
            held.update(zip(one.operation.results, map(Held, one.results), strict=True))
        later = {n for operation in graph.operations[place + 1 :] for n in operation.operands}
        for value in held.keys() - later - {*graph.inputs, *graph.outputs}:
            del held[value]
    return found


def peaks(traced: sp.Trace, rank: int) -> list[int]:
    """The memory of a rank at each operation, beside all that is held there."""
    found = []
    last_reads: dict[int, int] = {}
    simulate(traced, rank, last_reads)
    for one, alive in zip(traced.operations, simulate(traced, rank, last_reads), strict=True):
        moments = [alive]
        temporary = alive
        for reshard in one.before:
            temporary += held_bytes(reshard.source.with_spec(reshard.target), rank)
            moments.append(temporary + needed_bytes(reshard, rank))
        if one.operation.operator != WITH_SHARDING:
            temporary += sum(held_bytes(kind, rank) for kind in one.computed)
            moments.append(temporary)
            moments.append(alive + sum(held_bytes(kind, rank) for kind in one.results))
        for reshard in one.after:
            temporary += held_bytes(reshard.source.with_spec(reshard.target), rank)
            moments.append(temporary + needed_bytes(reshard, rank))
        found.append(max(moments))
    return found


def test_what_lies_so_already_is_held_once() -> None:
    mesh = DeviceMesh.of(x=4)
    rows, columns = spec(mesh, "x, -"), spec(mesh, "-, x")

    def function(x: Any) -> Any:
        y = x.shard(rows)
        z = sp.exp(y)
        # Moved there before, and an array that lies so: both are memory that is held.
        return z + x.shard(rows), sp.exp(x.shard(columns)) + y.shard(rows)

    random = np.random.default_rng(0).normal(size=(8, 8))
    array = sp.array(random, columns)
    first, again = array.shard(rows), array.shard(rows)
    assert all(map(np.shares_memory, first.shards.values(), again.shards.values()))
    assert array.shard(columns) is array
    traced = sp.trace(function, sp.abstract((8, 8), "float64", columns))
    size = 8 * 8 * 8 // mesh.size
    held = [one.held_bytes[0] // size for one in traced.operations]
    # x; x and y; x, y and z; x, y and z, and so on.
    assert held[:3] == [1, 2, 3]
    for place, rank in enumerate(traced.ranks):
        assert [one.live_bytes[place] for one in traced.operations] == peaks(traced, rank)


@every_strategy
@every_function
def test_memory_is_that_of_all_that_is_alive(case: Traced, strategy: str) -> None:
    traced = sp.trace(case.function, *case.types(), strategy=strategy)
    for place, rank in enumerate(traced.ranks):
        expected = peaks(traced, rank)
        assert [one.live_bytes[place] for one in traced.operations] == expected
        assert traced.peak_bytes[rank] == max(expected, default=traced.peak_bytes[rank])


STEPS = {
    "tanh": lambda x, y: sp.tanh(x),
    "twice": lambda x, y: x * 2.0,
    "sum": lambda x, y: x + y.mT if x.shape != y.shape else x + y,
    "product": lambda x, y: x @ (y.mT if x.shape == y.shape else y) @ x / 8.0,
    "turn": lambda x, y: sp.flip(x, axis=0),
    "total": lambda x, y: x - sp.sum(x, axis=1, keepdims=True),
    "largest": lambda x, y: sp.max(x, axis=0) + x,
    "softmax": lambda x, y: sp.softmax(x, axis=1),
    "joined": lambda x, y: sp.concat([x, x], axis=0)[: x.shape[0], :],
    "reshaped": lambda x, y: sp.reshape(sp.reshape(x, (-1,)), x.shape) + 1.0,
}
MATRICES = list(specs(MESH, 2, partial=True))


@given(
    st.lists(st.tuples(st.sampled_from([*STEPS, "reshard"]), st.integers(0, 99)), max_size=5),
    st.lists(st.sampled_from([None, *MATRICES]), min_size=2, max_size=2),
    st.sampled_from(STRATEGIES),
)
def test_any_function_runs_as_traced(
    steps: list[tuple[str, int]], cuts: list[ShardingSpec | None], strategy: str
) -> None:
    def function(x: Any, y: Any) -> Any:
        known = [x, y]
        for name, number in steps:
            one, other = known[number % len(known)], known[number // 10 % len(known)]
            if name == "reshard":
                known.append(one.shard(MATRICES[number % len(MATRICES)]))
            else:
                known.append(STEPS[name](one, other))
        return known[2:] or known

    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape) for shape in ((4, 5), (5, 4))]
    types = [sp.abstract(one.shape, "float64", at) for one, at in zip(arrays, cuts, strict=True)]
    traced = sp.trace(function, *types, strategy=strategy)
    counting = Counting()
    found = traced.run(*arrays, runner=counting)
    assert counting.moved_bytes == traced.moved_bytes
    assert tuple(one.type for one in found) == traced.outputs
    for one, other in zip(found, function(*map(sp.array, arrays)), strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-9, 1e-9)
    for place, rank in enumerate(traced.ranks):
        assert [one.live_bytes[place] for one in traced.operations] == peaks(traced, rank)


def test_memory_of_a_tensor_parallel_layer_by_hand() -> None:
    mesh = DeviceMesh.of(tp=4)
    types = [
        sp.abstract(shape, "float32", spec(mesh, text))
        for shape, text in (((8, 16), "-, -"), ((16, 32), "-, tp"), ((32, 16), "tp, -"))
    ]
    traced = sp.trace(lambda x, up, down: (sp.exp(x @ up) @ down).reduced(), *types)
    held = 8 * 16 * 4 + 16 * 8 * 4 + 8 * 16 * 4
    hidden, out = 8 * 8 * 4, 8 * 16 * 4
    # An all-reduce of 4 ranks sends and receives 3/4 of the shard twice.
    reduced = out + out + 2 * 2 * out * 3 // 4
    expected = [held + hidden, held + 2 * hidden, held + hidden + out, held + reduced]
    assert [one.live_bytes for one in traced.operations] == [(size,) * 4 for size in expected]
    assert traced.moved_bytes == 4 * 2 * out * 3 // 4


def test_a_function_that_does_nothing_holds_its_arguments() -> None:
    traced = sp.trace(lambda x: x, sp.abstract((6, 4), "int8", spec(MESH, "y, -")))
    assert dict(traced.peak_bytes) == dict.fromkeys(MESH.devices, 8)
    assert traced.moved_bytes == 0 and traced.operations == ()


def test_ranks_need_not_begin_at_0_nor_rise() -> None:
    mesh = DeviceMesh.of(x=2, y=2, devices=[12, 10, 13, 11])
    a = sp.abstract((5, 4), "float32", spec(mesh, "x, y"))
    b = sp.abstract((4, 3), "float32", spec(mesh, "y, -"))
    traced = sp.trace(lambda a, b: (a @ b).reduced(), a, b)
    # Three rows of five lie on 12 and 10: 24 + 24 bytes of operands, 36 of the product.
    assert traced.operations[0].live_bytes == (84, 84, 64, 64)
    assert list(traced.peak_bytes) == [12, 10, 13, 11]
    assert "ranks 10,12 hold at most 192 B" in str(traced)
    found = traced.run(np.ones((5, 4), "float32"), np.ones((4, 3), "float32"))
    np.testing.assert_array_equal(found.to_dense(), np.full((5, 3), 4.0))


def test_arrays_without_elements_or_none_at_all() -> None:
    empty = sp.abstract((0, 4), "float32", spec(MESH, "x, -"))
    traced = sp.trace(lambda x: sp.sum(x), empty)
    assert traced.run(np.ones((0, 4), "float32")).to_dense() == 0.0
    alone = sp.trace(lambda: sp.ones((2,)))
    assert "0 operations on 1 rank" in str(alone)
    np.testing.assert_array_equal(alone.run().to_dense(), np.ones(2))


def test_arguments_that_are_sharded_otherwise_become_what_was_traced() -> None:
    rows = spec(MESH, "x, -")
    traced = sp.trace(
        lambda a, b: (a + 1, b + 1),
        sp.abstract((4, 6), "float64"),
        sp.abstract((4, 6), "float64", rows),
    )
    data = np.arange(24.0).reshape(4, 6)
    columns = sp.array(data, spec(MESH, "-, y"))
    found = traced.run(columns, columns)
    assert tuple(one.type for one in found) == traced.outputs
    for one in found:
        np.testing.assert_array_equal(one.to_dense(), data + 1)


def test_the_strategy_of_costs_minds_the_topology() -> None:
    """Where links are quick a product is divided and gathered; where slow, all compute it."""
    mesh = DeviceMesh.of(x=4)
    x = sp.abstract((4096, 4096), "float32", spec(mesh, "-, -"))
    quick, slow = (
        sp.trace(
            lambda x, y: ((x @ x).shard(spec(mesh, "-, -")), y),
            x,
            sp.abstract((4,), "float32", spec(mesh, "x")),
            strategy="cost",
            topology=Topology([0] * 4, within_host=Link(bytes_per_s, 1e-6)),
        )
        for bytes_per_s in (1e12, 1e6)
    )
    assert quick.moved_bytes == 3 * 4096 * 4096 * 4
    assert slow.moved_bytes == 0


def test_times_are_those_of_the_programs() -> None:
    topology = load_preset("h100-8").topology()
    case = next(case for case in FUNCTIONS if case.name == "both ways")
    traced = sp.trace(case.function, *case.types(), topology=topology)
    inserted = [one for operation in traced.operations for one in operation.reshards]
    assert inserted
    expected = sum(one.program.estimate("float64", topology).seconds_s for one in inserted)
    assert traced.inserted_s == pytest.approx(expected) and expected > 0
    by_gloo = sp.trace(case.function, *case.types(), topology=topology, library="gloo")
    expected = sum(one.program.estimate("float64", topology, "gloo").seconds_s for one in inserted)
    assert by_gloo.inserted_s == pytest.approx(expected)
    with pytest.raises(UsageError, match="unknown library 'mpi'"):
        sp.trace(case.function, *case.types(), topology=topology, library="mpi")
    untimed = sp.trace(case.function, *case.types())
    assert untimed.inserted_s is untimed.seconds_s is untimed.compute_s is None


def test_shardings_reach_arguments_that_have_none() -> None:
    types = [sp.abstract((8, 8)), sp.abstract((8, 8))]
    function = lambda a, b: sp.exp((a @ b).shard(spec(MESH, "x, y")))  # noqa: E731
    traced = sp.trace(function, *types, strategy="aggressive")
    assert [str(kind.spec) for kind in traced.inputs if kind] == ["x, -", "-, y"]
    assert [str(one.results[0].spec) for one in traced.operations] == ["x, y"] * 3
    assert not list(itertools.chain(*(one.reshards for one in traced.operations)))
    # Each operation by itself knows nothing of what follows.
    eager = sp.trace(function, *types)
    assert [kind.spec for kind in eager.inputs if kind] == [None, None]


def test_operands_are_resharded_as_propagation_says() -> None:
    mesh = DeviceMesh.of(x=2, y=2)
    x = sp.abstract((8, 8), "float32", spec(mesh, "-, y"))
    w = sp.abstract((8, 8), "float32", spec(mesh, "y, -"))
    traced = sp.trace(lambda x, w: (x @ w).shard(spec(mesh, "x, -")), x, w, strategy="basic")
    (moved,) = traced.operations[0].before
    assert (moved.value, str(moved.target)) == (0, "x, y")
    assert [str(step) for step in moved.program.steps] == ["slice(x)"]
    (reduced,) = traced.operations[0].after
    assert [str(step) for step in reduced.program.steps] == ["all-reduce(y)"]
    assert traced.operations[1].moved_bytes == 0


def test_operations_on_constants_alone_are_no_part_of_the_graph() -> None:
    table = sp.array(np.arange(4.0))
    traced = sp.trace(lambda x: x + sp.exp(table), sp.abstract((4,), "float64"))
    assert [one.operator for one in traced.graph.operations] == ["add"]
    np.testing.assert_allclose(traced.run(np.ones(4)).to_dense(), 1 + np.exp(np.arange(4.0)))


def test_a_graph_says_what_was_recorded() -> None:
    traced = sp.trace(
        lambda a: sp.sum(sp.exp(a) * 2, axis=1).shard(spec(MESH, "y")),
        sp.abstract((4, 6), "float32", spec(MESH, "x, -")),
    )
    text = """\
%0: float32[4, 6], %2: int64[]
%1: float32[4, 6] = exp(%0) ([i, j]) -> ([i, j]) {i=4, j=6}
%3: float32[4, 6] = multiply(%1, %2) ([i, j], []) -> ([i, j]) {i=4, j=6}
%4: float32[4] = sum(%3; axis=1, keepdims=False) ([i, j]) -> ([i]) {i=4, j=6} reduction={j}
%5: float32[4] = with_sharding(%4; sharding='y') ([i]) -> ([i]) {i=4}
return %5"""
    assert str(traced.graph) == text
    assert str(Graph.parse(text)) == text


def test_arguments_keep_their_names_and_structure() -> None:
    def layer(x: Any, weights: dict[str, Any], scale: float) -> Any:
        return {"out": (x @ weights["w"] + weights["b"][0]) * scale, "same": [x]}

    arrays = (np.ones((2, 3)), {"w": np.ones((3, 4)), "b": [np.ones(4)]}, 0.5)
    traced = sp.trace(layer, *arrays)
    assert traced.names[:3] == ("x", "weights['w']", "weights['b'][0]")
    found = traced.run(*arrays)
    assert set(found) == {"out", "same"}
    np.testing.assert_array_equal(found["out"].to_dense(), np.full((2, 4), 2.0))
    np.testing.assert_array_equal(found["same"][0].to_dense(), np.ones((2, 3)))


def test_types_that_numpy_lacks_are_traced() -> None:
    mesh = DeviceMesh.of(x=2)
    x = sp.abstract((4, 4), "bfloat16", spec(mesh, "x, -"))
    wide = sp.abstract((4, 4), "float32")
    traced = sp.trace(
        lambda x, w: (x @ x, x + w, x > 0, sp.astype(x, "float32"), sp.concat([x, x]), x * 2),
        x,
        wide,
    )
    names = [kind.dtype.name for kind in traced.outputs]
    assert names == ["bfloat16", "float32", "bool", "float32", "bfloat16", "bfloat16"]
    narrow = sp.trace(lambda x: sp.astype(x, "float8_e4m3fn"), x).outputs[0]
    assert narrow.dtype.name == "float8_e4m3fn"


def test_large_arrays_are_traced_without_their_memory() -> None:
    mesh = DeviceMesh.of(dp=8, tp=8)
    x = sp.abstract((1 << 20, 1 << 14), "bfloat16", spec(mesh, "dp, -"))
    w = sp.abstract((1 << 14, 1 << 16), "bfloat16", spec(mesh, "-, tp"))
    traced = sp.trace(lambda x, w: sp.softmax(sp.gelu(x @ w), axis=-1), x, w)
    assert traced.outputs[0].shape == (1 << 20, 1 << 16)
    assert max(traced.peak_bytes.values()) > 1 << 30


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x[0, 0] > 0 else -x,
        lambda x: x * float(x[0, 0]),
        lambda x: x[int(x[0, 0])],
        lambda x: x[x > 0],
        lambda x: sp.nonzero(x),
        lambda x: sp.unique_values(x),
        lambda x: sp.array(np.asarray(x)),
    ],
    ids=["if", "float", "int", "mask", "nonzero", "unique", "dense"],
)
def test_what_elements_alone_tell_cannot_be_traced(function: Any) -> None:
    with pytest.raises(UsageError, match=r"the elements of \w+\[.*\] were asked for"):
        sp.trace(function, sp.abstract((4, 4), "float64", spec(MESH, "x, y")))


def test_errors_say_what_is_wrong() -> None:
    x = sp.abstract((4, 4), "float64", spec(MESH, "x, y"))
    with pytest.raises(UsageError, match="unknown strategy 'best'; it is one of eager, basic"):
        sp.trace(sp.exp, x, strategy="best")
    with pytest.raises(UsageError, match="returned 3, which is not an array"):
        sp.trace(lambda x: (x, 3), x)
    with pytest.raises(UsageError, match="2 arguments for the function"):
        sp.trace(lambda x: x, x, x)
    other = sp.abstract((4, 4), "float64", spec(DeviceMesh.of(z=2), "z, -"))
    with pytest.raises(MeshError, match="an operation has one mesh"):
        sp.trace(lambda x, y: x + y, x, other)
    with pytest.raises(SpecError):
        sp.abstract((4,), "float64", spec(MESH, "x, y"))
    with pytest.raises(SpecError):
        sp.trace(lambda x, y: x @ y, x, sp.abstract((5, 4)))
    traced = sp.trace(sp.exp, x)
    with pytest.raises(ShardError, match="2 arrays, but 1 were traced"):
        traced.run(np.ones((4, 4)), np.ones((4, 4)))
    with pytest.raises(ShardError, match=r"float64\[4, 5\], but float64\[4, 4\] was traced"):
        traced.run(np.ones((4, 5)))
    with pytest.raises(ShardError, match=r"float32\[4, 4\], but float64\[4, 4\]"):
        traced.run(np.ones((4, 4), dtype=np.float32))


def test_the_recorder_is_gone_after_a_failure() -> None:
    from reshard.spmd.shards.operation_call import recorders

    with pytest.raises(ZeroDivisionError):
        sp.trace(lambda x: 1 // 0, sp.abstract((4, 4)))
    assert recorders.active == ()


def test_arrays_of_a_runner_may_be_used_beside_traced_ones() -> None:
    weights = sp.array(np.arange(12.0).reshape(6, 2), spec(MESH, "y, -"))
    traced = sp.trace(lambda x: (x @ weights).reduced(), sp.abstract((3, 6), "float64"))
    data = np.arange(18.0).reshape(3, 6)
    np.testing.assert_allclose(traced.run(data).to_dense(), data @ weights.to_dense())
    names = dict(zip(traced.names, traced.inputs, strict=True))
    assert names["constant"] is weights.type


def test_a_sharding_whole_by_another_name_moves_nothing() -> None:
    traced = sp.trace(lambda x: x.shard(replicated(MESH, 2)), sp.abstract((4, 4)))
    assert traced.moved_bytes == 0 and not list(traced.operations[0].reshards)


def layer_trace(strategy: str) -> sp.Trace:
    mesh = DeviceMesh.of(dp=2, tp=4)
    shapes = (((64, 32), "dp, -"), ((32, 128), "-, tp"), ((128, 32), "tp, -"))
    types = [sp.abstract(shape, "bfloat16", spec(mesh, text)) for shape, text in shapes]

    def layer(x: Any, up: Any, down: Any) -> Any:
        return sp.softmax(x + sp.relu(x @ up) @ down, axis=-1)

    return sp.trace(layer, *types, strategy=strategy, topology=load_preset("h100-8").topology())


def golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("RESHARD_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive"])
def test_the_golden_tables(strategy: str) -> None:
    golden(f"layer_{strategy}.txt", f"{layer_trace(strategy)}\n")


def test_the_document_says_what_the_trace_says() -> None:
    traced = layer_trace("eager")
    found = json.loads(traced.to_json())
    assert found["mesh"] == {"dp": 2, "tp": 4} and found["ranks"] == list(range(8))
    assert found["moved_bytes"] == sum(
        reshard["moved_bytes"]
        for one in found["operations"]
        for reshard in (*one["before"], *one["after"])
    )
    assert found["peak_bytes"] == [
        max(sizes)
        for sizes in zip(*(one["live_bytes"] for one in found["operations"]), strict=True)
    ]
    assert found["seconds_s"] == traced.seconds_s
    assert [one["operator"] for one in found["operations"]] == [
        one.operator for one in traced.graph.operations
    ]
    assert found["inputs"][0] == {
        "value": 0,
        "name": "x",
        "dtype": "bfloat16",
        "shape": [64, 32],
        "sharding": "dp, -",
    }


def test_the_page_of_the_documents_is_what_the_example_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr("sys.argv", ["tracing.py", str(page)])
    runpy.run_path(str(ROOT / "examples" / "tracing.py"), run_name="__main__")
    printed = capsys.readouterr().out
    document = (ROOT / "docs" / "tracing.md").read_text()
    tables = re.findall(r"^```text\n(.*?)^```", document, flags=re.MULTILINE | re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        assert table in printed
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_golden_page() -> None:
    golden("layer.html", layer_trace("eager").html("a layer"))


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive", "widest", "cost"])
def test_queries_keys_and_values_gather_a_sequence_once(strategy: str) -> None:
    mesh = DeviceMesh.of(tp=4)
    x = sp.abstract((64, 32), "float32", spec(mesh, "tp, -"))
    weights = [sp.abstract((32, 256), "float32", spec(mesh, "-, tp")) for _ in range(3)]

    def heads(x: sp.ShardedArray, *weights: sp.ShardedArray) -> list[sp.ShardedArray]:
        return [(x @ w).shard(spec(mesh, "-, tp")) for w in weights]

    traced = sp.trace(heads, x, *weights, strategy=strategy)
    assert traced.moved_bytes == 64 * 32 * 4 * 3
    assert [len(one.reused) for one in traced.operations if one.operation.operator == "matmul"] == [
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("function", [sp.rms_norm, sp.log_softmax], ids=["rms_norm", "log_softmax"])
def test_contributions_are_combined_by_one_all_reduce(function: Any) -> None:
    mesh = DeviceMesh.of(tp=4)
    x = sp.abstract((8, 32), "float32", spec(mesh, "-, tp"))
    w = sp.abstract((32, 16), "float32", spec(mesh, "tp, -"))
    traced = sp.trace(lambda x, w: function(x @ w), x, w)
    assert traced.moved_bytes == 8 * 16 * 4 * 2 * 3


@pytest.mark.parametrize("strategy", ["eager", "basic"])
def test_an_operation_whose_shardings_stay_is_compiled_once(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    functions = AbstractRunner.functions

    def counted(runner: AbstractRunner, operator: Operator, work: LocalWork) -> list[Function]:
        compiled.append(operator.name)
        return functions(runner, operator, work)

    monkeypatch.setattr(AbstractRunner, "functions", counted)
    x = sp.abstract((8, 8), "float32", spec(DeviceMesh.of(x=4), "x, -"))
    traced = sp.trace(lambda x: sp.tanh(sp.exp(x)), x, strategy=strategy)
    assert traced.outputs[0].spec is x.spec
    assert compiled == ["exp", "tanh"]
