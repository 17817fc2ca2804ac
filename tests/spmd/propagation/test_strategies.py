"""Programs over several meshes: traced, placed and run as eager arrays are, gradients back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.spmd.propagation.strategies import mesh_parts
from reshard.spmd.tracing.graph_recording import record

ONE = DeviceMesh.of(x=2)
TWO = DeviceMesh.of(y=2, z=2, devices=range(2, 6))
TURNED = DeviceMesh.of(w=2, devices=(1, 0))
STRATEGIES = ("eager", "basic", "aggressive", "widest", "cost")


def function(x: Any, first: Any, second: Any, scale: Any) -> Any:
    """From the first mesh to the second and on to a third, one value being over no mesh."""
    hidden = sp.relu(x @ first + scale).shard(spec(TWO, "y, -"))
    there = sp.sum(hidden @ second * scale).shard(spec(TURNED, ""))
    return there + sp.sum(x * x).shard(spec(TURNED, ""))


def arguments() -> list[Any]:
    draw = np.random.default_rng(0).normal
    return [
        sp.array(draw(size=(8, 6)), spec(ONE, "x, -")),
        sp.array(draw(size=(6, 4)), spec(ONE, "-, -")),
        sp.array(draw(size=(4, 4)), spec(TWO, "-, z")),
        sp.array(np.full(4, 0.5)),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_values_and_gradients_are_those_of_eager_arrays(strategy: str, library: str) -> None:
    with sp.running(sp.in_process(library)):
        given = arguments()
        expected = float(function(*given))
        traced = sp.trace(function, *given, strategy=strategy)
        assert float(traced.run(*given)) == pytest.approx(expected, rel=1e-12)
        program = sp.jit(function, strategy=strategy)
        for _ in range(3):
            assert float(program(*given)) == pytest.approx(expected, rel=1e-12)

        def loss(x: Any, first: Any, second: Any) -> Any:
            return function(x, first, second, given[3])

        step = sp.jit(sp.grad(loss, argnums=(0, 1, 2)), strategy=strategy)
        wanted = sp.grad(loss, argnums=(0, 1, 2))(*given[:3])
        for _ in range(2):
            for own, other, of in zip(step(*given[:3]), wanted, given, strict=False):
                assert own.mesh is of.mesh
                np.testing.assert_allclose(own.to_dense(), other.to_dense(), rtol=1e-12)


def test_the_trace_has_the_movement_between_meshes() -> None:
    topology = load_preset("h100-8").topology()
    traced = sp.trace(function, *arguments(), topology=topology)
    assert traced.ranks == tuple(range(6)) and traced.meshes == (ONE, TWO, TURNED)
    crossing = [
        moved
        for one in traced.operations
        for moved in one.reshards
        if moved.source.spec is not None and moved.source.spec.mesh is not moved.target.mesh
    ]
    # Of 8x4 to two parts, each on two ranks; then four and two contributions to two ranks.
    assert [moved.moved_bytes for moved in crossing] == [2 * 8 * 4 * 8, 2 * 4 * 8, 2 * 8]
    assert all(moved.seconds_s > 0 for moved in crossing)
    (hidden,) = (one for one in traced.operations if one.operation.operator == "relu")
    assert hidden.compute_s[0] > 0 and hidden.compute_s[2:] == (0.0,) * 4
    # Ranks 2 and on hold `second`, and `scale` that every rank has.
    assert hidden.held_bytes[2:] == (4 * 2 * 8 + 4 * 8,) * 4
    assert traced.peak_bytes[0] > traced.peak_bytes[2]
    assert "x=2 over ranks 0,1; y=2, z=2 over ranks 2-5; w=2 over ranks 0,1" in str(traced)
    assert "y=2, z=2 over ranks 2-5" in traced.html()
    found = json.loads(traced.to_json())
    assert [one["ranks"] for one in found["meshes"]] == [[0, 1], [2, 3, 4, 5], [1, 0]]
    assert found["mesh"] == {}


def test_overlap_and_a_limit_know_of_all_ranks() -> None:
    given = arguments()
    plain = sp.jit(function).trace(*given).peak_bytes
    assert set(sp.jit(function, overlap=2).trace(*given).peak_bytes) == set(range(6))
    limited = sp.jit(function, live_bytes=max(plain.values()))
    assert max(limited.trace(*given).peak_bytes.values()) <= max(plain.values())
    assert float(limited(*given)) == pytest.approx(float(function(*given)), rel=1e-12)


def test_parts_are_graphs_by_themselves() -> None:
    given = [one.type for one in arguments()]
    recorded = record(function, given)
    assert recorded.meshes == (ONE, TWO, TURNED)
    first, second, third = mesh_parts(recorded)
    assert [len(part.graph.operations) for part in (first, second, third)] == [5, 3, 1]
    assert sorted({*first.places, *second.places, *third.places}) == [
        place for place, one in enumerate(recorded.operations) if one.operator != "with_sharding"
    ]
    # Two values leave the first mesh, one leaves the second, and the third has the result.
    assert [len(part.graph.outputs) for part in (first, second, third)] == [2, 1, 1]


def test_the_same_ranks_in_another_order_change_places() -> None:
    x = sp.array(np.arange(4.0), spec(ONE, "x"))
    program = sp.jit(lambda x: x.shard(spec(TURNED, "-")) * 2.0)
    for _ in range(2):
        assert program(x).to_dense().tolist() == [0.0, 2.0, 4.0, 6.0]
    cut = sp.jit(lambda x: x.shard(spec(TURNED, "w")))
    for _ in range(2):
        shards = cut(x).shards
        assert [shards[rank].tolist() for rank in (0, 1)] == [[2.0, 3.0], [0.0, 1.0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loops_and_branches_may_read_and_make_arrays_of_several_meshes(strategy: str) -> None:
    x, w = arguments()[0], sp.array(np.linspace(-1, 1, 6), spec(TWO, "z"))

    def value(x: Any, w: Any) -> Any:
        def step(carried: Any, _: Any) -> Any:
            there = sp.sin(carried.shard(spec(TWO, "y, -")) * w)
            return there.shard(spec(ONE, "-, x")), there

        last, every = sp.scan(step, x * 2, length=2)
        chosen = sp.cond(sp.sum(last) > 99, lambda: last.shard(spec(TWO, "z, -")), lambda: every[0])
        return sp.sum(chosen * every[1]) + sp.sum(last).shard(spec(TWO, ""))

    expected = value(x, w)
    slopes = sp.grad(value, (0, 1))(x, w)
    program = sp.jit(value, strategy=strategy)
    for _ in range(2):
        assert float(program(x, w)) == pytest.approx(float(expected), rel=1e-12)
    for one, other in zip(sp.grad(program, (0, 1))(x, w), slopes, strict=True):
        assert one.mesh is other.mesh
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-12, 1e-13)


@sp.eagerly
def go_there_and_back(x: Any, w: Any) -> Any:
    return (x.shard(spec(TWO, "y, -")) * w).shard(spec(ONE, "x, -"))


def in_a_loop(x: Any, w: Any) -> Any:
    def step(carried: Any, _: Any) -> Any:
        return (carried.shard(spec(TWO, "y, -")) * w).shard(spec(ONE, "x, -")), None

    return sp.scan(step, x, length=2)[0] + w * 3.0


def in_a_branch(x: Any, w: Any) -> Any:
    def there(x: Any) -> Any:
        return (x.shard(spec(TWO, "y, -")) * (w * 2.0)).shard(spec(ONE, "x, -"))

    return sp.cond(sp.sum(x) > 0, there, lambda x: x * w, x) + x


def in_a_loop_of_loops(x: Any, w: Any) -> Any:
    return sp.scan(lambda x, _: (in_a_loop(x, w), None), x, length=2)[0]


def while_small(x: Any, w: Any) -> Any:
    def grow(x: Any) -> Any:
        return (x.shard(spec(TWO, "y, -")) * w).shard(spec(ONE, "x, -"))

    return sp.while_loop(lambda x: sp.sum(x) < 900, grow, x) * w


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "function",
    [in_a_loop, in_a_branch, in_a_loop_of_loops, while_small, go_there_and_back],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_over_no_mesh_meets_meshes_that_only_a_body_names(
    function: Any, strategy: str
) -> None:
    x = sp.array(np.arange(12.0).reshape(6, 2), spec(ONE, "x, -"))
    w = sp.array(np.linspace(1.5, 2, 12).reshape(6, 2))
    expected, program = function(x, w).to_dense(), sp.jit(function, strategy=strategy)
    for _ in range(2):
        np.testing.assert_allclose(program(x, w).to_dense(), expected, 1e-12)
    assert set(program.trace(x, w).peak_bytes) == {*ONE.devices, *TWO.devices}
    if function is while_small:
        return

    def value(x: Any, w: Any) -> Any:
        return sp.sum(sp.sin(function(x, w)))

    slopes = sp.jit(sp.grad(value, (0, 1)), strategy=strategy)(x, w)
    for one, other in zip(slopes, sp.grad(value, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-11)


def test_cotangents_over_several_meshes_of_what_is_over_none_are_added() -> None:
    x = sp.array(np.arange(6.0), spec(ONE, "x"))
    w = sp.array(np.full(6, 2.0))

    def value(x: Any, w: Any) -> Any:
        there = (x.shard(spec(TWO, "y z")) * w).shard(spec(ONE, "x"))
        return sp.sum(sp.sin(there + x * w))

    for differentiated in (sp.grad(value, 1), sp.jit(sp.grad(value, 1), strategy="cost")):
        found = differentiated(x, w).to_dense()
        np.testing.assert_allclose(found, np.cos(np.arange(6.0) * 4) * 2 * np.arange(6.0), 1e-12)
