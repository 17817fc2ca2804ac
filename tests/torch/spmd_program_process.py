"""One rank of a job that runs programs: ranks agree once on all movements of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import PlanError, ReshardError, RunError, UsageError
from reshard.torch.exchange.groups import RankGroup

MESH = DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])
DATA = np.arange(48.0).reshape(8, 6)
# Far below the group's timeout of 60 s.
SOON_S = 20.0
FAILING = {"here": False}


@contextmanager
def counted_rounds() -> Iterator[list[int]]:
    """How often ranks ask each other inside."""
    found, plain = [0], RankGroup.find_maxima

    def counting(self: RankGroup, numbers: Any) -> list[int]:
        found[0] += 1
        return plain(self, numbers)

    RankGroup.find_maxima = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        RankGroup.find_maxima = plain  # type: ignore[method-assign]


def moves(x: Any, texts: tuple[str, ...]) -> Any:
    total = x
    for text in texts:
        total = total * 2.0 + x.shard(spec(MESH, text))
    return total.shard(spec(MESH, "x, y"))


def moved_twice(x: Any) -> Any:
    return moves(x, ("y, x", "x y, -", "-, y x", "y, x"))


def moved_otherwise(x: Any) -> Any:
    return moves(x, ("y, -", "x y, -", "-, y x", "y, x"))


def given(offset: float = 0.0) -> Any:
    return sp.array(DATA + offset, spec(MESH, "x, y"))


def check_rounds() -> None:
    """A program agrees at its begin and at its end; movement by movement each agrees."""
    jitted = sp.jit(moved_twice)
    expected = moved_twice(given()).to_dense()
    first = jitted(given())
    with counted_rounds() as alone:
        eager = moved_twice(given())
    with counted_rounds() as together:
        again = jitted(given())
    assert (alone[0], together[0]) == (8, 2), (alone, together)
    for one in (first, eager, again):
        np.testing.assert_array_equal(one.to_dense(), expected)


def check_loops() -> None:
    """What a loop does inside a program agrees by itself: all of it gives the same."""

    def function(x: Any) -> Any:
        x = moved_twice(x)
        x, _ = sp.scan(lambda c, _: (moved_twice(c) / 64.0, None), x, length=3)
        return moved_twice(x)

    expected = function(given()).to_dense()
    jitted = sp.jit(function)
    for _ in range(3):
        np.testing.assert_array_equal(jitted(given()).to_dense(), expected)


def fails_here(x: Any) -> Any:
    if FAILING["here"]:
        raise ValueError("this rank has had enough")
    return x + 0.0


def expect(kind: type[ReshardError], part: str, function: Callable[[], Any]) -> None:
    begin_s = time.monotonic()
    with pytest.raises(kind, match=part):
        function()
    assert time.monotonic() - begin_s < SOON_S


def check_failure() -> None:
    """One rank fails inside a program: all others raise its cause soon, and all go on after it."""
    own = sp.operator("([i, j]) -> ([i, j])", fails_here, name="failing")
    jitted = sp.jit(lambda x: moved_twice(own(moved_twice(x))))
    expected = jitted(given()).to_dense()
    np.testing.assert_array_equal(jitted(given()).to_dense(), expected)
    FAILING["here"] = dist.get_rank() == 1
    kind, part = (UsageError, "had enough") if dist.get_rank() == 1 else (RunError, "had enough")
    expect(kind, part, lambda: jitted(given()))
    FAILING["here"] = False
    np.testing.assert_array_equal(jitted(given()).to_dense(), expected)


def check_difference() -> None:
    """Ranks that run other programs learn so before anything moves."""
    programs = sp.jit(moved_twice), sp.jit(moved_otherwise)
    for one in programs:
        one(given())
    mine = programs[dist.get_rank() == 2]
    expect(PlanError, "'the program'", lambda: mine(given()))
    for one, function in zip(programs, (moved_twice, moved_otherwise), strict=True):
        np.testing.assert_array_equal(one(given()).to_dense(), function(given()).to_dense())


def check_infinite_factors() -> None:
    """Elements for which the program is not right: all ranks find out, and none counts as lost."""
    left = np.array([[3.0, -1.0], [0.5, 7.0]])
    jitted = sp.jit(lambda a, b, c: (a @ b) * c)
    for last in (1.0, 2.0, np.inf, 1.0):
        factor = np.array([[1.0, 2.0], [3.0, last]])
        arrays = (
            sp.array(left, spec(MESH, "-, x")),
            sp.array(np.ones((2, 2)), spec(MESH, "x, -")),
            sp.array(factor, spec(MESH, "-, y")),
        )
        found = jitted(*arrays).to_dense()
        np.testing.assert_array_equal(found, (left @ np.ones((2, 2))) * factor)


def check_threads() -> None:
    """Programs of two threads at once: each has all its movements to itself, in one order."""
    programs = [sp.jit(moved_twice), sp.jit(moved_otherwise)]
    arrays = [given(1.0), given(2.0)]
    for one, x in zip(programs, arrays, strict=True):
        one(x)
    expected = [one(x).to_dense() for one, x in zip(programs, arrays, strict=True)]
    turns = [threading.Event(), threading.Event()]
    found: list[Any] = [None, None]

    def run(number: int) -> None:
        with sp.running(sp.over_processes()):
            assert turns[number].wait(SOON_S)
            found[number] = programs[number](arrays[number])

    threads = [threading.Thread(target=run, args=(n,), name=f"worker {n}") for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread, turn in zip(threads, turns, strict=True):
        turn.set()
        thread.join(SOON_S)
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.to_dense(), right)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with sp.running(sp.over_processes()):
        check_rounds()
        check_loops()
        check_infinite_factors()
        check_threads()
        check_difference()
        check_failure()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
