"""Arguments that are given up: freed after their last use, gone for the caller, in the trace."""

from __future__ import annotations

import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import UsageError
from reshard.spmd.programs import steps as reused_memory

MESH = DeviceMesh.of(x=2)
SIZE = 1 << 17


def chain(x: Any) -> Any:
    """Each value is read once."""
    for _ in range(4):
        x = sp.sin(x)
    return x


def rows(value: float = 1.0) -> Any:
    return sp.full((SIZE,), value, spec=spec(MESH, "x"))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_what_is_given_up_is_gone_and_results_are_equal(library: str, overlap: int) -> None:
    with sp.running(sp.in_process(library)):
        kept, donating = sp.jit(chain), sp.jit(chain, donate=0, overlap=overlap)
        for _ in range(3):
            x = rows()
            expected = kept(x).to_dense()
            found = donating(x)
            assert np.array_equal(found.to_dense(), expected)
            for use in (
                lambda x: x + 1.0,
                sp.sum,
                lambda x: x.to_dense(),
                lambda x: x.shards,
                lambda x: x.shard(spec(MESH, "-")),
                donating,
                kept,
            ):
                with pytest.raises(UsageError, match=r"float64\[131072\].* was given up"):
                    use(x)


def test_memory_is_free_after_the_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each value has memory of its own, as the trace counts it.
    monkeypatch.setattr(reused_memory, "MIN_REUSED_BYTES", 1 << 62)
    peaks = []
    for program in (sp.jit(chain), sp.jit(chain, donate=0)):
        program(rows())
        tracemalloc.start()
        x = rows()
        tracemalloc.reset_peak()
        program(x)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del x
    size_bytes = SIZE * 8
    # The argument, a value and the next; without the argument two of these.
    assert abs(peaks[0] - 3 * size_bytes) < size_bytes // 8
    assert abs(peaks[1] - 2 * size_bytes) < size_bytes // 8
    x = rows()
    plain, donated = (
        sum(sp.jit(chain, donate=places).trace(x).peak_bytes.values()) for places in ((), (0,))
    )
    assert (plain, donated) == (3 * size_bytes, 2 * size_bytes)
    overlapped = sp.jit(chain, donate=0, overlap=1).trace(x)
    assert sum(overlapped.peak_bytes.values()) == 2 * size_bytes


def test_a_limit_counts_what_is_given_up() -> None:
    x = rows()
    most = max(sp.jit(chain, donate=0).trace(x).peak_bytes.values())
    limited = sp.jit(chain, donate=0, live_bytes=most)
    assert max(limited.trace(x).peak_bytes.values()) == most
    assert np.array_equal(limited(x).to_dense(), chain(rows()).to_dense())


@pytest.mark.parametrize("overlap", [0, 1])
def test_what_a_program_may_need_again_is_kept_and_counted(overlap: int) -> None:
    """A sum that waits, times an array: whether that is infinite is known when it runs."""

    def scaled(a: Any, b: Any, factor: Any) -> Any:
        return sp.sin((sp.sin(a) @ b) * factor)

    side = 256
    programs = {n: sp.jit(scaled, donate=n, overlap=overlap) for n in ((), (0,))}
    measured, traced = {}, {}
    for is_array in (True, False):
        for places, program in programs.items():
            factor = sp.array(np.full((side, side), 2.0)) if is_array else 2.0
            for _ in range(2):
                a = sp.ones((side, side), spec=spec(MESH, "-, x"))
                b = sp.ones((side, side), spec=spec(MESH, "x, -"))
                held = sum(program.trace(a, b, factor).peak_bytes.values())
                tracemalloc.start()
                # What was made before has memory, too.
                a, b = a + 0.0, b + 0.0
                tracemalloc.reset_peak()
                program(a, b, factor)
                measured[is_array, places] = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            traced[is_array, places] = held
    # With an array as factor nothing is freed, and the trace says so.
    assert traced[True, (0,)] == traced[True, ()]
    # A number is as finite as it was before.
    assert traced[False, (0,)] < traced[False, ()]
    size_bytes = side * side * 8
    assert measured[False, (0,)] < measured[False, ()] - size_bytes // 2
    assert abs(measured[True, (0,)] - measured[True, ()]) < size_bytes // 2


def test_steps_give_up_their_state() -> None:
    def step(state: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
        return {"sum": state["sum"] + x, "count": state["count"] + 1, "same": state["same"]}, x

    program = sp.jit(step, donate=(0,))
    state = {"sum": rows(0.0), "count": sp.array([0]) * 1, "same": rows(5.0)}
    x = rows(2.0)
    first = state["sum"]
    for _ in range(4):
        state, same = program(state, x)
        assert same is x
    assert float(state["sum"].to_dense()[0]) == 8.0 and int(state["count"].to_dense()[0]) == 4
    assert float(state["same"].to_dense()[0]) == 5.0
    with pytest.raises(UsageError, match="given up"):
        first.to_dense()


def test_shards_are_freed_though_the_caller_has_the_array() -> None:
    x = rows()
    program = sp.jit(chain, donate=0)
    program(rows())
    holder = weakref.ref(x._shards[0])
    found = program(x)
    assert holder() is None and found is not None


def test_gradients_keep_what_would_be_given_up() -> None:
    program = sp.jit(lambda x: sp.sum(chain(x)), donate=0)
    x = rows()
    slope = sp.grad(program)(x)
    assert slope.shape == x.to_dense().shape


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_is_given_twice_and_returned_by_its_other_place_is_whole(library: str) -> None:
    program = sp.jit(lambda x, y: (y, {"x": x}, x + y), donate=0)
    with sp.running(sp.in_process(library)):
        for _ in range(3):
            x = sp.array(np.arange(6.0), spec(MESH, "x"))
            y, others, total = program(x, x)
            assert y.to_dense().tolist() == others["x"].to_dense().tolist() == [0, 1, 2, 3, 4, 5]
            assert total.to_dense().tolist() == [0, 2, 4, 6, 8, 10]
            with pytest.raises(UsageError, match="given up"):
                x.to_dense()


def test_errors_say_what_is_wrong() -> None:
    for wrong in (-1, "0", 1.5, True, (0, -1), None):
        with pytest.raises(UsageError, match="give the position of an argument"):
            sp.jit(chain, donate=wrong)
    with pytest.raises(UsageError, match="a call with 1 arguments"):
        sp.jit(chain, donate=1)(rows())
