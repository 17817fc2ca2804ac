"""Products in pieces beside what moves: the same results and bytes, and less time by the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.errors import UsageError
from reshard.spmd.programs.decomposition import decompose
from reshard.spmd.programs.overlap import estimate_overlap, overlapped
from reshard.spmd.tracing.trace import Trace
from reshard.topology import Device, Link, Topology
from spmd.traced_functions import FUNCTIONS, MESH, Traced

TP = DeviceMesh.of(tp=4)
BOTH = DeviceMesh.of(dp=2, tp=2)


def machine(bandwidth: float = 1e6, latency_s: float = 0.0) -> Topology:
    """Of slow devices: messages and products take about as long."""
    link = Link(bandwidth, latency_s)
    return Topology.of(
        hosts=1, ranks_per_host=6, within_host=link, device=Device(1e9, (("float64", 4e6),))
    )


def over(mesh: DeviceMesh, *texts: str) -> list[Any]:
    return [spec(mesh, text) for text in texts]


def gathered_rows(x: Any, w: Any) -> Any:
    return x.shard(spec(TP, "-, -")) @ w


def gathered_for_three(x: Any, w: Any, v: Any) -> Any:
    n = sp.tanh(x).shard(spec(TP, "-, -"))
    return (n @ w) * sp.silu(n @ v), sp.sum(n, axis=0)


def gathered_weight(x: Any, w: Any) -> Any:
    return sp.tanh(x @ w.shard(spec(TP, "-, -")))


def gathered_tokens(x: Any, w: Any) -> Any:
    return sp.einsum("btd,dhc->bhtc", x.shard(spec(BOTH, "dp, -, -")), w)


def scattered_rows(x: Any, w: Any) -> Any:
    return (x @ w).shard(spec(TP, "tp, -"))


def scattered_tokens(x: Any, w: Any) -> Any:
    return sp.tanh((x @ w).shard(spec(BOTH, "dp, tp, -")))


def kept_rows(x: Any, w: Any) -> Any:
    return sp.tanh(x @ w)


def summed(x: Any, w: Any) -> Any:
    return (x @ w).reduced() + 1.0


def slopes(x: Any, w: Any) -> Any:
    return sp.value_and_grad(lambda w: sp.sum(gathered_weight(x, w) ** 2))(w)


Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], list[Any]]
CASES: dict[str, Case] = {
    "rows gathered": (gathered_rows, ((32, 8), (8, 12)), over(TP, "tp, -", "-, tp")),
    "gathered for three": (
        gathered_for_three,
        ((32, 8), (8, 12), (8, 12)),
        over(TP, "tp, -", "-, tp", "-, tp"),
    ),
    "columns of a weight": (gathered_weight, ((8, 8), (8, 64)), over(TP, "tp, -", "-, tp")),
    "rows of a weight": (gathered_weight, ((8, 8), (8, 16)), over(TP, "tp, -", "tp, -")),
    "tokens gathered": (
        gathered_tokens,
        ((4, 16, 6), (6, 4, 2)),
        over(BOTH, "dp, tp, -", "-, tp, -"),
    ),
    "rows scattered": (scattered_rows, ((32, 8), (8, 12)), over(TP, "-, tp", "tp, -")),
    "tokens scattered": (
        scattered_tokens,
        ((4, 16, 6), (6, 8)),
        over(BOTH, "dp, -, tp", "tp, -"),
    ),
    "rows kept": (kept_rows, ((32, 64), (64, 48)), over(TP, "tp, -", "tp, -")),
    "summed": (summed, ((8, 8), (8, 16)), over(TP, "-, tp", "tp, -")),
    "with the gradient": (slopes, ((8, 8), (8, 64)), over(TP, "tp, -", "-, tp")),
}


def traced_of(case: Case, **options: Any) -> tuple[Trace, list[np.ndarray]]:
    function, shapes, specs = case
    random = np.random.default_rng(0)
    given = [random.normal(size=shape) for shape in shapes]
    types = [sp.abstract(x.shape, "float64", s) for x, s in zip(given, specs, strict=True)]
    return sp.trace(function, *types, **options), given


def leaves(tree: Any) -> list[Any]:
    return [x for one in tree for x in leaves(one)] if isinstance(tree, list | tuple) else [tree]


def operators(traced: Trace) -> Counter[str]:
    return Counter(one.operation.operator for one in traced.operations)


@pytest.mark.parametrize("name", CASES)
def test_products_in_pieces_have_equal_results(name: str) -> None:
    traced, given = traced_of(CASES[name], topology=machine())
    found = decompose(traced)
    assert found is not None
    products = operators(found)["matmul"] + operators(found)["einsum"]
    assert products > operators(traced)["matmul"] + operators(traced)["einsum"]
    assert found.moved_bytes == traced.moved_bytes
    assert [one.spec for one in found.outputs] == [one.spec for one in traced.outputs]
    for one, right in zip(leaves(found.run(*given)), leaves(traced.run(*given)), strict=True):
        assert one.spec is right.spec
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["eager", "basic", "cost"])
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_any_decomposed_function_has_equal_results(case: Traced, strategy: str) -> None:
    topology = machine()
    traced = sp.trace(case.function, *case.types(), strategy=strategy, topology=topology)
    found = decompose(traced)
    if found is None:
        return
    assert found.moved_bytes == traced.moved_bytes
    arrays = case.arrays()
    with sp.running(sp.in_process("numpy")):
        whole = leaves(traced.run(*arrays))
        pieces = leaves(found.run(*arrays))
    for one, right in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-12, atol=1e-12)


def test_products_of_even_sizes_are_decomposed() -> None:
    """Of the functions above, some with more even shapes are really cut."""

    def attention(x: Any, q: Any, k: Any, v: Any) -> Any:
        scores = sp.softmax((x @ q) @ sp.matrix_transpose(x @ k), axis=-1)
        return scores @ (x @ v) + x

    specs = over(MESH, "x, -", "-, y", "-, y", "-, y")
    case = attention, ((24, 12), (12, 12), (12, 12), (12, 12)), specs
    traced, given = traced_of(case, topology=machine())
    found = decompose(traced)
    assert found is not None
    assert operators(found)["matmul"] > operators(traced)["matmul"]
    expected = traced.run(*given).to_dense()
    np.testing.assert_allclose(found.run(*given).to_dense(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_products_are_decomposed_only_if_that_is_faster(name: str) -> None:
    case = CASES[name]
    traced, _ = traced_of(case, topology=machine())
    whole, found = estimate_overlap(traced, 1), overlapped(traced, 1)
    assert found.overlapped_s is not None and whole.overlapped_s is not None
    # Never slower; where products are all there is, quicker.
    assert found.overlapped_s <= whole.overlapped_s
    if name in ("rows gathered", "rows scattered", "tokens gathered"):
        assert found.overlapped_s < 0.95 * whole.overlapped_s
    # Where each message takes long to begin, and without devices, nothing is cut.
    for topology in (
        machine(latency_s=1.0),
        Topology.of(hosts=1, ranks_per_host=6, within_host=Link(1e6)),
        None,
    ):
        assert decompose(traced_of(case, topology=topology)[0]) is None


def test_programs_are_decomposed_only_over_processes() -> None:
    function, shapes, specs = CASES["rows gathered"]
    random = np.random.default_rng(0)
    x, w = (
        sp.array(random.normal(size=shape), one) for shape, one in zip(shapes, specs, strict=True)
    )
    program = sp.jit(function, overlap=1, topology=machine())
    assert operators(program.trace(x, w))["matmul"] > 1
    for _ in range(2):
        found = program(x, w)
        np.testing.assert_array_equal(found.to_dense(), function(x, w).to_dense())
    (compiled,) = program._programs.values()
    assert [one.operator for one in compiled._graph.operations] == [
        "with_sharding",
        "matmul",
    ]


def test_decomposed_programs_satisfy_a_memory_limit() -> None:
    function, shapes, specs = CASES["rows scattered"]
    types = [sp.abstract(shape, "float64", s) for shape, s in zip(shapes, specs, strict=True)]
    plain = sp.jit(function, overlap=1, topology=machine()).trace(*types)
    whole = sp.jit(function, overlap=1).trace(*types)
    assert operators(plain)["matmul"] > 1
    for traced in (plain, whole):
        limit = max(traced.peak_bytes.values())
        program = sp.jit(function, overlap=1, topology=machine(), live_bytes=limit)
        assert max(program.trace(*types).peak_bytes.values()) <= limit


LINE = DeviceMesh.of(x=4)
CUT, WHOLE = spec(LINE, "x, -"), spec(LINE, "-, -")
TOPOLOGY = load_preset("h100-8").topology()
LAYERS, ROWS, WIDTH = 6, 1024, 2048


def layers(weights: list[Any], x: Any) -> Any:
    for w in weights:
        x = sp.tanh(x @ w.shard(WHOLE))
    return x


def arguments() -> tuple[list[Any], Any]:
    return [sp.abstract((WIDTH, WIDTH), "float32", CUT)] * LAYERS, sp.abstract(
        (ROWS, WIDTH), "float32", CUT
    )


@pytest.mark.parametrize("strategy", ["eager", "basic", "cost"])
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_steps_hold_no_more_than_operations(case: Traced, strategy: str) -> None:
    traced = sp.jit(case.function, strategy=strategy).trace(*case.types())
    by_steps = estimate_overlap(traced, 0)
    for rank, size in by_steps.peak_bytes.items():
        # Operands that move are freed when they are read, not when all of the operation is done.
        assert 0.7 * traced.peak_bytes[rank] <= size <= traced.peak_bytes[rank]
    assert [one.operation for one in by_steps.operations] == list(traced.graph.operations)


def test_weights_that_are_gathered_ahead_take_memory_and_save_time() -> None:
    blocking, *others = (
        sp.jit(layers, topology=TOPOLOGY, overlap=overlap).trace(*arguments())
        for overlap in (0, 1, 2, 3)
    )
    assert blocking.overlapped_s is None
    weight_bytes = WIDTH * WIDTH * 4
    for ahead, one in enumerate(others):
        assert one.seconds_s == one.overlapped_s
        assert one.moved_bytes == blocking.moved_bytes
        # Gathered before it is read, a weight is there together with the one that is read.
        assert one.peak_bytes[0] >= blocking.peak_bytes[0] + (ahead > 0) * weight_bytes
    assert [one.peak_bytes[0] for one in others] == sorted(one.peak_bytes[0] for one in others)
    computing_s, moving_s = blocking.compute_s[0], blocking.inserted_s
    assert blocking.seconds_s == pytest.approx(computing_s + moving_s)
    found_s = others[1].overlapped_s
    assert max(computing_s, moving_s) <= found_s < 0.9 * blocking.seconds_s


def test_without_devices_movements_take_their_time() -> None:
    program = sp.jit(lambda x: x.shard(WHOLE) + 1.0, topology=TOPOLOGY, overlap=2)
    traced = program.trace(sp.abstract((ROWS, WIDTH), "float32", CUT))
    assert traced.inserted_s <= traced.seconds_s <= traced.inserted_s + traced.compute_s[0] * 1.01


def test_a_memory_limit_counts_reshards_in_flight() -> None:
    free = sp.jit(layers).trace(*arguments())
    limit = max(free.peak_bytes.values())
    assert sp.jit(layers, live_bytes=limit).trace(*arguments()).strategy == "eager"
    traced = sp.jit(layers, overlap=4).trace(*arguments())
    assert max(traced.peak_bytes.values()) > limit


def test_overlap_has_no_effect_in_a_single_process() -> None:
    random = np.random.default_rng(0)
    x = sp.array(random.normal(size=(8, 4)), CUT)
    weights = [sp.array(random.normal(size=(4, 4)), CUT) for _ in range(3)]
    expected = sp.jit(layers)(weights, x).to_dense()
    program = sp.jit(layers, overlap=2)
    for _ in range(2):
        np.testing.assert_array_equal(program(weights, x).to_dense(), expected)


@pytest.mark.parametrize("overlap", [-1, True, 1.5, "2", None])
def test_an_invalid_overlap_raises(overlap: Any) -> None:
    with pytest.raises(UsageError, match="overlap="):
        sp.jit(layers, overlap=overlap)
