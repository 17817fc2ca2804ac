"""Traces of overlapped programs: their memory and time, and what is no count of movements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.errors import UsageError
from reshard.spmd.programs.overlap.overlapped_trace import with_overlap
from spmd.traced_functions import FUNCTIONS, Traced

MESH = DeviceMesh.of(x=4)
CUT, WHOLE = spec(MESH, "x, -"), spec(MESH, "-, -")
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
    by_steps = with_overlap(traced, 0, "nccl")
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


def test_a_limit_counts_what_is_under_way() -> None:
    free = sp.jit(layers).trace(*arguments())
    limit = max(free.peak_bytes.values())
    assert sp.jit(layers, live_bytes=limit).trace(*arguments()).strategy == "eager"
    traced = sp.jit(layers, overlap=4).trace(*arguments())
    assert max(traced.peak_bytes.values()) > limit


def test_in_one_process_it_changes_nothing() -> None:
    random = np.random.default_rng(0)
    x = sp.array(random.normal(size=(8, 4)), CUT)
    weights = [sp.array(random.normal(size=(4, 4)), CUT) for _ in range(3)]
    expected = sp.jit(layers)(weights, x).to_dense()
    program = sp.jit(layers, overlap=2)
    for _ in range(2):
        np.testing.assert_array_equal(program(weights, x).to_dense(), expected)


@pytest.mark.parametrize("overlap", [-1, True, 1.5, "2", None])
def test_what_is_no_count_is_refused(overlap: Any) -> None:
    with pytest.raises(UsageError, match="overlap="):
        sp.jit(layers, overlap=overlap)
