"""Shardings of arguments chosen for a mesh and a limit, against all that there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from reshard.cost import load_preset
from reshard.errors import MeshError, PlanError, UsageError
from reshard.spmd.programs.jit import JitOptions, JittedFunction
from reshard.spmd.tracing.trace import Trace
from selection import keep_where
from spmd import transformer_block as block

TOPOLOGY = load_preset("h100-8").topology()
ONE, TWO = DeviceMesh.of(x=4), DeviceMesh.of(x=2, y=2)


def product(x: Any, w: Any) -> Any:
    return sp.exp(x @ w) + 1.0


def layer(x: Any, up: Any, down: Any) -> Any:
    return x + sp.relu(x @ up) @ down


def sorted_product(x: Any, w: Any) -> Any:
    """Rows that are read whole, and a value that two operations read."""
    y = sp.sort(x, axis=0) @ w
    return y * sp.sum(y, axis=1, keepdims=True)


def loss(w: Any, x: Any) -> Any:
    return sp.sum(sp.square(x @ w))


CASES: dict[str, tuple[Callable[..., Any], DeviceMesh, list[tuple[int, ...]]]] = {
    "product": (product, TWO, [(2048, 256), (256, 512)]),
    "product of few bytes": (product, ONE, [(8, 8), (8, 16)]),
    "layer": (layer, ONE, [(1024, 256), (256, 1024), (1024, 256)]),
    "sorted": (sorted_product, ONE, [(1024, 128), (128, 128)]),
    "gradient": (sp.value_and_grad(loss), ONE, [(512, 512), (1024, 512)]),
}


def every_spec(mesh: DeviceMesh, shape: tuple[int, ...]) -> list[ShardingSpec]:
    """Each axis, in any order, on one dimension or none."""
    found = {}
    for axes in itertools.permutations(mesh.axis_names):
        for dims in itertools.product(range(-1, len(shape)), repeat=len(axes)):
            own: list[list[str]] = [[] for _ in shape]
            for axis, dim in zip(axes, dims, strict=True):
                if dim >= 0:
                    own[dim].append(axis)
            found[spec(mesh, ", ".join(" ".join(one) or "-" for one in own))] = None
    return list(found)


def peak(traced: Trace) -> int:
    return max(traced.peak_bytes.values())


@pytest.mark.parametrize(
    "name",
    keep_where(
        lambda name: name != "product", CASES, "two axes have too many layouts to try them all"
    ),
)
def test_nothing_is_better_in_a_small_graph(name: str) -> None:
    function, mesh, shapes = CASES[name]
    program = sp.jit(function, strategy="cost", topology=TOPOLOGY)
    judged = []
    for specs in itertools.product(*(every_spec(mesh, shape) for shape in shapes)):
        given = [sp.abstract(s, "float32", one) for s, one in zip(shapes, specs, strict=True)]
        traced = program.trace(*given)
        judged.append((traced.seconds_s, peak(traced)))
    peaks = sorted({size for _, size in judged})
    arguments = [sp.abstract(shape) for shape in shapes]
    for limit in (None, peaks[len(peaks) // 2], peaks[len(peaks) // 8], peaks[0]):
        best = min(seconds for seconds, size in judged if limit is None or size <= limit)
        found = sp.auto(function, mesh, *arguments, live_bytes=limit)
        assert found.is_exact
        assert found.trace.seconds_s == pytest.approx(best, rel=1e-9)
        assert limit is None or peak(found.trace) <= limit
    with pytest.raises(PlanError, match="least that was found") as refused:
        sp.auto(function, mesh, *arguments, live_bytes=peaks[0] // 2)
    assert f"live_bytes={peaks[0] // 2:,}" in str(refused.value)


def test_a_program_computes_what_the_function_does() -> None:
    random = np.random.default_rng(0)
    x, up = random.normal(size=(64, 16)), random.normal(size=(16, 32))
    weights = {"up": up, "down": random.normal(size=(32, 16))}

    def f(weights: Any, x: Any, scale: float) -> Any:
        return sp.value_and_grad(lambda w: scale * sp.sum(layer(x, w["up"], w["down"])))(weights)

    found = sp.auto(f, TWO, weights, x, 2.0)
    placed = found.place(weights, x, 2.0)
    assert placed[2] == 2.0 and placed[0]["up"].spec is found.specs[0]["up"]
    value, slopes = found.program(*placed)
    wanted, wanted_slopes = f({n: sp.array(w) for n, w in weights.items()}, sp.array(x), 2.0)
    np.testing.assert_allclose(float(value), float(wanted), rtol=1e-12)
    for name, slope in slopes.items():
        # Each gradient lies where its parameter does.
        assert slope.spec is found.specs[0][name]
        np.testing.assert_allclose(slope.to_dense(), wanted_slopes[name].to_dense(), rtol=1e-12)
    assert found.program.traced_count == 1
    with pytest.raises(UsageError, match=r"like those of sp\.auto"):
        found.place(weights)


def test_a_step_returns_weights_and_states_where_they_lay() -> None:
    shapes = {"w": sp.abstract((64, 64)), "b": sp.abstract((64,))}
    adam = sp.AdamW(0.1)
    state = {"step": sp.abstract((), "int64"), "m": shapes, "v": shapes}

    def step(p: Any, state: Any, x: Any) -> Any:
        value, slopes = sp.value_and_grad(lambda p: sp.sum(sp.square(x @ p["w"] + p["b"])))(p)
        return value, *adam.update(p, slopes, state)

    state = {name: state.get(name, shapes) for name in adam.init({"w": sp.ones((1,))})}
    state["step"] = sp.abstract((), "int64")
    found = sp.auto(step, ONE, shapes, state, sp.abstract((1 << 18, 64)))
    given = [one for _, one in sorted(_named(found.specs[:2]))]
    returned = dict(zip(found.trace.graph.outputs, found.trace.outputs, strict=True))
    results = found.trace.graph.returned
    made = sorted(_named(results[1:]))
    assert given == [returned[place.index].spec for _, place in made]
    assert any(one is not None and "x" in str(one) for one in found.specs[2:])


def _named(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [one for key in tree for one in _named(tree[key], f"{path}.{key}")]
    if isinstance(tree, tuple | list):
        return [one for n, value in enumerate(tree) for one in _named(value, f"{path}.{n}")]
    return [(path, tree)]


def test_what_has_a_sharding_keeps_it() -> None:
    x = sp.abstract((2048, 256), "float32", spec(TWO, "-, x"))
    found = sp.auto(product, TWO, x, sp.abstract((256, 512)))
    assert found.specs[0] is x.spec
    alone = sp.auto(product, TWO, x, sp.abstract((256, 512), "float32", spec(TWO, "x, y")))
    assert [str(one) for one in alone.specs] == ["-, x", "x, y"] and alone.is_exact


@pytest.mark.parametrize(
    ("backward", "axes"),
    keep_where(
        lambda case: case == (False, {"tp": 4}),
        itertools.product((False, True), ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4})),
        "each search takes long; small graphs have two axes by default",
    ),
    ids=str,
)
def test_a_block_is_no_slower_than_by_hand(backward: bool, axes: dict[str, int]) -> None:
    """A transformer block of few tokens, by data and tensor parallelism, in no more memory."""
    sizes = block.Sizes(4, 64, 128, 8, 4, 256, 8, 512)

    def forward(p: Any, tokens: Any, targets: Any) -> Any:
        return block.loss(p, tokens, targets, sizes)

    function = sp.value_and_grad(forward) if backward else forward
    shapes = sizes.shapes()
    tokens = sp.abstract((sizes.batch, sizes.length), "int64")
    mesh = DeviceMesh.of(**axes)
    parameters = {name: sp.abstract(shape) for name, shape in shapes.items()}
    found = sp.auto(function, mesh, parameters, tokens, tokens)
    assert not found.is_exact
    traced = {}
    for fsdp, strategy in itertools.product((False, True), ("eager", "cost")):
        given = block.shardings(mesh, fsdp)
        by_hand = {n: sp.abstract(shape, "float32", given[n]) for n, shape in shapes.items()}
        batch = tokens.with_spec(block.batch_sharding(mesh))
        program = sp.jit(function, strategy=strategy, topology=TOPOLOGY)
        traced[fsdp, strategy] = hand = program.trace(by_hand, batch, batch)
        assert found.trace.seconds_s <= hand.seconds_s * (1 + 1e-9)
    # Over dp alone, data parallelism is what is chosen forward without a limit.
    assert backward or "tp" not in axes or peak(traced[False, "cost"]) < peak(found.trace)
    # In what they hold by hand, and by hand with weights cut over dp as well.
    limits = {peak(traced[False, "cost"]), *(peak(traced[True, s]) for s in ("eager", "cost"))}
    if backward:
        # Each search takes long there: one limit, over both axes.
        limits = {peak(traced[True, "cost"])} if len(axes) > 1 else set()
    for limit in limits:
        within = sp.auto(function, mesh, parameters, tokens, tokens, live_bytes=limit)
        fitting = [hand.seconds_s for hand in traced.values() if peak(hand) <= limit]
        assert peak(within.trace) <= limit
        assert within.trace.seconds_s <= min(fitting) * (1 + 1e-9)
        # Near the best layout by hand that keeps the limit there is a much better one.
        assert not backward or within.trace.seconds_s < 0.75 * min(fitting)


def test_what_cannot_be_chosen_is_refused() -> None:
    x = sp.abstract((8, 8))
    with pytest.raises(UsageError, match="is not a DeviceMesh"):
        sp.auto(product, "x=4", x, x)
    with pytest.raises(UsageError, match="a function of arrays"):
        sp.auto(3, ONE, x, x)
    with pytest.raises(UsageError, match="live_bytes=0"):
        sp.auto(product, ONE, x, x, live_bytes=0)
    with pytest.raises(UsageError, match="not a Topology"):
        sp.auto(product, ONE, x, x, topology="fast")
    there = x.with_spec(spec(TWO, "x, -"))
    with pytest.raises(MeshError, match="arrays over"):
        sp.auto(product, ONE, x, there)
    with pytest.raises(MeshError, match="shards over no other"):
        sp.auto(lambda x: sp.exp(x.shard(there.spec)), ONE, x)
    with pytest.raises(UsageError, match="elements"):
        sp.auto(lambda x: x if float(sp.sum(x)) > 0 else -x, ONE, x)


def test_shardings_of_another_graph_are_not_applied() -> None:
    """Inputs that are cut along the sequence record ring attention, which has more values."""
    mesh = DeviceMesh.of(x=4)

    def attend(x: Any) -> Any:
        return sp.attention(x, x, x) * 2.0

    whole, cut = (
        sp.abstract((1, 1, 64, 8), "float32", spec(mesh, s)) for s in ("-, -, -, -", "-, -, x, -")
    )
    placed = sp.jit(attend, strategy="cost", topology=TOPOLOGY).trace(whole).graph
    options = JitOptions(strategy="cost", topology=TOPOLOGY, placed=placed)
    traced = JittedFunction(attend, options).trace(cut)
    expected = sp.jit(attend, strategy="cost", topology=TOPOLOGY).trace(cut)
    assert len(expected.graph.operations) > len(placed.operations)
    assert traced.graph.shardings == expected.graph.shardings
