"""Copies in pieces and by threads: everything once, and failures that end them all."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

import reshard
from reshard.execution import copies
from reshard.execution.copies import Copy, Window, carry_out, find_windows
from selection import choose


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 16)
    monkeypatch.setattr(copies, "BYTES_FOR_A_THREAD", 16)
    monkeypatch.setattr(copies, "_BYTES_WITHOUT_LOCK", 1)
    monkeypatch.setattr(copies, "BYTES_FOR_A_THREAD", 16)


@pytest.mark.usefixtures("tiny_pieces")
@given(array_shapes(min_dims=0, max_dims=4, min_side=0), st.randoms(use_true_random=False))
def test_pieces_are_small_and_cover_every_element_once(shape: tuple[int, ...], random: Any) -> None:
    axes = random.sample(range(len(shape)), len(shape))
    target = np.zeros([shape[axis] for axis in np.argsort(axes)], np.int16).transpose(axes)
    source = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    for piece in Copy(target, source, combine=np.add).pieces():
        assert piece.size_bytes <= 16
        piece.carry_out()
    assert np.array_equal(target, source)


@pytest.mark.usefixtures("tiny_pieces")
@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_pieces_of_lists_cover_every_element_once(sizes: list[int], random: Any) -> None:
    out_of = np.ix_(*(random.sample(range(size), random.randint(1, size)) for size in sizes))
    into = np.ix_(*(random.sample(range(40), positions.size) for positions in out_of))
    source = np.arange(math.prod(sizes)).reshape(sizes) + 1
    target, expected = (np.zeros([40] * len(sizes), int) for _ in range(2))
    expected[into] = source[out_of]
    carry_out([Copy(target, source, 0, None, into, out_of)], 1)
    assert np.array_equal(target, expected)
    target[...] = 0
    pieces = list(Copy(target, source, 0, np.add, into, out_of).pieces())
    assert len(pieces) > 1 or 8 * source[out_of].size <= 16 * max(sizes)
    for piece in pieces:
        piece.carry_out()
    assert np.array_equal(target, expected)


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_orders_run_one_after_another(threads: int) -> None:
    target = np.zeros(1000)
    parts = [np.full(1000, 3.0), np.full(1000, 5.0), np.full(1000, 2.0)]
    steps: list[Copy] = [
        Copy(target, parts[2], 2, lambda left, right: left * right),
        Copy(target, parts[0], 0),
        Copy(target, parts[1], 1, lambda left, right: left - right),
    ]
    for order in itertools.permutations(steps):
        carry_out(order, threads)
        assert (target == (3 - 5) * 2).all()


class Broken(Exception):
    pass


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_failure_in_one_thread_is_raised_and_ends_the_others(error: type[BaseException]) -> None:
    before = threading.active_count()
    done = []
    all_begin = threading.Barrier(3, timeout=10)

    def combine(left: Any, right: Any) -> Any:
        if len(done) < 3:
            done.append(threading.current_thread().name)
            # The last to come: whoever waits for the first thread does not see it at once.
            if all_begin.wait() == 2:
                raise error("piece")
        else:
            done.append(threading.current_thread().name)
        return right

    target = np.zeros(100_000)
    with pytest.raises(error, match="piece"):
        carry_out([Copy(target, np.ones(100_000), 0, combine)], 3)
    assert threading.active_count() == before
    assert len({*done[:3]}) == 3
    # Of 50,000 pieces the others can have taken some more, until the failure was seen.
    assert len(done) < 25_000


def test_a_failure_of_a_plan_in_a_thread_reaches_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reshard.execution.arrays import NumpyArrays

    def combine(*_: Any) -> Any:
        raise MemoryError("no room to add")

    monkeypatch.setattr(NumpyArrays, "combine", combine)
    mesh = reshard.DeviceMesh.of(x=2)
    plan = reshard.plan(*(reshard.spec(mesh, t).layout((1 << 19,)) for t in ("- | sum(x)", "-")))
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room to add"):
        plan.run({rank: np.zeros(1 << 19) for rank in range(2)}, threads=4)
    assert threading.active_count() == before


def test_few_bytes_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise Broken

    monkeypatch.setattr(copies, "ThreadPoolExecutor", refuse)
    small, large = np.zeros(100), np.zeros(1 << 20)
    carry_out([Copy(small, np.ones(100))], 8)
    carry_out([Copy(large, np.ones(1 << 20))], 1)
    with pytest.raises(Broken):
        carry_out([Copy(large, np.ones(1 << 20))], 2)


def test_large_arrays_are_the_same_by_any_number_of_threads() -> None:
    mesh = reshard.DeviceMesh.of(x=8)
    layouts = [
        reshard.spec(mesh, text).layout((1024, 1024)) for text in ("x, -", "-, x", "-, - | sum(x)")
    ]
    random = np.random.default_rng(1)
    dense = random.standard_normal((1024, 1024)).astype(np.float32)
    held = {rank: dense[128 * rank :][:128] for rank in range(8)}
    for found in (reshard.plan(*layouts[:2]).run(held, threads=n) for n in (1, 2, 16)):
        assert all(np.array_equal(found[r], dense[:, 128 * r :][:, :128]) for r in range(8))
    partial = {rank: np.roll(dense, rank, 0) for rank in range(8)}
    one, many = (reshard.plan(layouts[2], layouts[1]).run(partial, threads=n) for n in (1, 16))
    assert all(one[rank].tobytes() == many[rank].tobytes() for rank in range(8))


# Windows.


@settings(max_examples=choose(90, 300))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1))
def test_windows_are_the_pieces(rows: list[tuple[int, int, int]]) -> None:
    check_windows(rows)


@settings(max_examples=choose(60, 200))
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9
    ),
    st.integers(2, 20),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), max_size=2),
)
def test_patterns_that_repeat_take_no_more_windows(
    pattern: list[tuple[int, int, int]], times: int, end: list[tuple[int, int, int]]
) -> None:
    windows = check_windows(pattern * times + end)
    if len(pattern) <= 8:
        assert len(windows) <= len(pattern) + 2 * len(end)


def check_windows(rows: list[tuple[int, int, int]]) -> list[Window]:
    """Pieces of (length, gap in the target, gap in the source), one behind the other."""
    length, gaps = np.array([row[0] for row in rows]), np.array([row[1:] for row in rows])
    begin = np.cumsum(length[:, None] + gaps, axis=0) - length[:, None]
    windows = find_windows(length, begin[:, 0], begin[:, 1])
    found = [
        (w.target + i * w.target_step, w.source + i * w.source_step, w.length)
        for w in windows
        for i in range(w.pieces)
    ]
    assert sorted(found) == list(zip(*begin.T.tolist(), length.tolist(), strict=True))
    return windows


INTERLEAVED = ["x@cyclic8", "x@cyclic3", "x", "x@cyclic1", "x@balanced", "-"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("after", INTERLEAVED)
@pytest.mark.parametrize("before", INTERLEAVED)
def test_interleaved_cuts_of_large_arrays(before: str, after: str, threads: int) -> None:
    mesh, shape = reshard.DeviceMesh.of(x=4), (210, 401)
    dense = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for sides in ((f"{before}, -", f"{after}, -"), (f"-, {before}", f"{after}, -")):
        layouts = [reshard.spec(mesh, text).layout(shape) for text in sides]
        start = [cut_by_elements(layout, dense) for layout in layouts]
        found = reshard.plan(*layouts).run(start[0], threads=threads)
        assert all(np.array_equal(found[rank], start[1][rank]) for rank in range(4))


def cut_by_elements(layout: reshard.Layout, dense: Any) -> dict[int, Any]:
    """The shards, index by index from the run tables."""
    found = {}
    for slot in layout.holders:
        (cell,) = layout.cells_of(slot)
        places = [
            np.concatenate([np.arange(a, b) for a, b, *_ in table.runs_of(part)])
            for table, part in zip(layout.tables, layout.cell_part[cell].tolist(), strict=True)
        ]
        found[slot] = dense[np.ix_(*places)]
    return found
