"""The cost model: formulas against the collectives they stand for, tables against single pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import DeviceMesh, ShardingSpec, spec
from reshard.cost import load_preset
from reshard.cost.estimate import collective_cost
from reshard.dtypes import dtype
from reshard.spmd.core.operator import operators, rule_of
from reshard.spmd.propagation.axes import AxisTable
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine, PartBits, operations_of
from selection import choose

MESH = DeviceMesh.of(x=2, y=4)
TEXTS = [
    "-, -",
    "x, -",
    "y, -",
    "-, y",
    "x, y",
    "y, x",
    "x y, -",
    "y x, -",
    "y:(1)2, x",
    "-, y:(2)2",
]
SPECS = [spec(MESH, text) for text in TEXTS]
SPECS += [spec(MESH, f"{text} | sum(x)") for text in ("-, -", "y, -", "-, y")]
SPECS += [spec(MESH, f"-, - | {kind}") for kind in ("sum(x y)", "max(y)")]
SHAPE = (64, 32)


def model_of(machine: Machine) -> CostModel:
    return CostModel(AxisTable.of(MESH), machine)


@given(
    st.lists(st.sampled_from(SPECS), min_size=1, max_size=8),
    st.lists(st.sampled_from(SPECS), min_size=1, max_size=8),
    st.sampled_from([(64, 32), (5, 7), (1, 9), (0, 4)]),
    st.sampled_from([1, 4]),
)
@settings(max_examples=choose(18, 60), deadline=None)
def test_a_table_has_what_each_pair_has(
    sources: list[ShardingSpec], targets: list[ShardingSpec], shape: tuple[int, int], size: int
) -> None:
    model = model_of(Machine(load_preset("h100-8").topology(2)))
    rows, columns = ([model.table.encoded(one) for one in some] for some in (sources, targets))
    by_formulas = model.movements_s(rows, columns, shape, size)
    bounds = model.bounds_s(rows, columns, shape, size)
    for (i, one), (j, other) in itertools.product(enumerate(rows), enumerate(columns)):
        assert by_formulas[i, j] == model.movement_s(one, other, shape, size)
        assert bounds[i, j] == model.bound_s(one, other, shape, size)


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("x, -", "-, -", [("all-gather", "x", 64 * 32)]),
        ("-, -", "x, y", []),
        ("-, - | sum(y)", "-, -", [("all-reduce", "y", 64 * 32)]),
        ("-, - | sum(y)", "y, -", [("reduce-scatter", "y", 64 * 32)]),
        ("-, - | sum(y)", "y, x", [("reduce-scatter", "y", 64 * 32 // 2)]),
        ("y, -", "-, y", [("all-to-all", "y", 64 * 32 // 4)]),
        ("x, - | sum(y)", "-, -", [("all-reduce", "y", 32 * 32), ("all-gather", "x", 64 * 32)]),
        ("-, - | sum(y)", "-, - | sum(y)", []),
    ],
)
def test_formulas_are_those_of_collectives(
    source: str, target: str, steps: list[tuple[str, str, int]]
) -> None:
    machine = Machine(load_preset("h100-8").topology(2))
    model = model_of(machine)
    one, other = (model.table.encoded(spec(MESH, text)) for text in (source, target))
    expected = 0.0
    for kind, axis, elements in steps:
        groups = MESH.groups([axis])
        assert machine.topology is not None
        expected += max(
            collective_cost(kind, ranks, 4 * elements, machine.topology, "nccl").seconds_s
            for ranks in groups
        )
    assert model.movement_s(one, other, SHAPE, 4) == pytest.approx(expected)


def test_more_parts_than_bits_are_counted_too() -> None:
    mesh = DeviceMesh.of(**{f"axis{n}": 2 for n in range(12)})
    table = AxisTable.of(mesh)
    chains = itertools.combinations(mesh.axis_names, 2)
    shardings = [table.encoded(spec(mesh, f"{one} {other}")) for one, other in chains]
    bits = PartBits(shardings)
    assert bits.dtype is np.int64
    parts = [(n, 1, 2, 0) for n in range(70)]
    many = PartBits([shardings[0]._replace(dims=(tuple(parts),))])
    assert many.dtype is object
    masks = np.array([many.of(tuple(parts[:3])), many.of(tuple(parts[60:])), 0], dtype=object)
    assert many.sizes(masks).tolist() == [8, 1024, 1]
    assert many.parts(int(masks[1])) == tuple(parts[60:])


def test_a_turn_of_ring_attention_computes_what_its_attributes_say() -> None:
    shapes, attributes = operators["attention_turn"].example or ([], {})
    rule = rule_of("attention_turn", shapes, **attributes)
    made = [*shapes, (*shapes[0][:-1], shapes[2][-1]), shapes[0][:-1]]
    tensors = [(tuple(shape), dtype("float32")) for shape in made]
    machine = Machine(operations_per_s=1.0, memory_bytes_per_s=1e12)
    model = CostModel(AxisTable.of(DeviceMesh.of(x=2)), machine)
    cuts = [()] * len(rule.sizes)
    found_s = model.compute_s("attention_turn", rule, cuts, tensors, attributes)
    assert found_s == operations_of("attention_turn", rule, None, attributes) > 0
