"""One rank of a job in which the elements of one rank decide: all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard.spmd as sp
from rank_cases import report_each
from reshard import DeviceMesh, ShardingSpec, spec
from reshard.errors import ArrayIndexError, ReshardError, UsageError

MESH = DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])
DATA = np.arange(35.0).reshape(7, 5)


def expect_on_every_rank(
    function: Callable[[], Any], kind: type[ReshardError], part: str, times: int = 2
) -> None:
    """All ranks raise the same, compiled or not."""
    for _ in range(times):
        try:
            function()
        except kind as error:
            said = str(error)
        else:
            raise AssertionError(f"no {kind.__name__} of {part!r} on rank {dist.get_rank()}")
        assert part in said, said
        every: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, said)
        assert set(every) == {said}, every


def infinite_factors_of_one_rank_are_seen_by_all() -> None:
    """Contributions meet a factor of which one rank alone has what is infinite."""
    left = np.array([[3.0, -1.0], [0.5, 7.0]])
    partial = sp.array(left, spec(MESH, "-, x")) @ sp.array(np.ones((2, 2)))
    assert str(partial.spec) == "-, - | sum(x)"
    for last in (1.0, np.inf, 1.0):
        data = np.array([[1.0, 2.0], [3.0, last]])
        for text in ("-, y", "-, -"):
            factor = sp.array(data, spec(MESH, text))
            for found, expected in (
                (partial * factor, (left @ np.ones((2, 2))) * data),
                (partial @ factor, left @ np.ones((2, 2)) @ data),
            ):
                assert ("sum(x)" in str(found.spec)) == np.isfinite(last), found.spec
                np.testing.assert_array_equal(np.asarray(found), expected)


def types_of_ranks_without_elements_are_refused() -> None:
    """Types that a library refuses, where some ranks have no elements or no place in the mesh."""
    three = DeviceMesh.of(z=3, devices=[2, 0, 1])

    def ones(shape: tuple[int, ...], dtype: str, cut: ShardingSpec) -> Any:
        return sp.ones(shape, dtype=dtype, spec=cut)

    half, truth = ones((4, 4), "float16", spec(three, "z, -")), ones((6,), "bool", spec(three, "z"))
    number, complex_one = (
        ones((1, 1), "int64", spec(MESH, "-, x y")),
        sp.ones((), dtype="complex64"),
    )
    nothing = ones((1, 0), "complex64", spec(DeviceMesh.of(o=1, devices=[2]), "-, -"))
    in_one = ones((1, 1), "complex64", spec(MESH, "-, x"))
    brain = ones((1, 1), "bfloat16", spec(MESH, "x, -"))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: half < complex_one, "less of float16[4, 4]"),
        (lambda: truth - truth, "subtract of bool[6]"),
        (lambda: sp.vecdot(number, brain), "vecdot of int64[1, 1], bfloat16[1, 1]"),
        (lambda: number @ brain, "matmul of int64[1, 1], bfloat16[1, 1]"),
        (lambda: sp.argsort(in_one, axis=1), "argsort of complex64[1, 1]"),
        (lambda: sp.argsort(nothing, axis=1), "argsort of complex64[1, 0]"),
        (lambda: 2 % sp.array(np.array([True, False]), spec(MESH, "x")), "remainder of 2, bool[2]"),
    ]
    for function, said in cases:
        expect_on_every_rank(function, UsageError, said)
    assert float(sp.sum(half)) == 16.0


def indices_out_of_range_on_one_rank_are_raised_on_all() -> None:
    places = sp.array(np.array([0, 3, 6, 9]), spec(MESH, "x y"))
    good = sp.array(np.array([0, 3, 6, -7]), spec(MESH, "x y"))
    for text in ("x, -", "-, y"):
        table = sp.array(DATA, spec(MESH, text))
        for function in (
            lambda at, table=table: sp.take(table, at, axis=0),
            lambda at, table=table: table[at, 0],
            lambda at, table=table: table[at, 0 * at],
            lambda at, table=table: sp.take_along_axis(table, at[:, None], axis=0),
            lambda at, table=table: sp.embedding(at, table),
            lambda at, table=table: sp.scatter(table, at, DATA[:4]),
        ):
            function(good)
            expect_on_every_rank(lambda f=function: f(places), ArrayIndexError, "index 9")
        found = sp.take(table, good, axis=0)
        np.testing.assert_array_equal(np.asarray(found), DATA[[0, 3, 6, 0]])


def a_singular_matrix_of_one_rank_is_raised_on_all() -> None:
    stack = np.stack([np.eye(3)] * 3 + [np.zeros((3, 3))])
    matrices = sp.array(stack, spec(MESH, "x y, -, -"))
    expect_on_every_rank(lambda: sp.linalg.inv(matrices), UsageError, "inv of float64[4, 3, 3]")


def a_zero_divisor_of_one_rank_is_raised_on_all() -> None:
    whole = sp.array(np.array([7, 8, 9, 10]), spec(MESH, "x y"))
    zero = sp.array(np.array([1, 2, 3, 0]), spec(MESH, "x y"))
    for divided in (lambda: whole // zero, lambda: whole % zero):
        expect_on_every_rank(divided, UsageError, "int64[4]")
    assert float(sp.sum(whole)) == 34.0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with sp.running(sp.over_processes()):
        report_each(
            [
                indices_out_of_range_on_one_rank_are_raised_on_all,
                a_singular_matrix_of_one_rank_is_raised_on_all,
                a_zero_divisor_of_one_rank_is_raised_on_all,
                infinite_factors_of_one_rank_are_seen_by_all,
                types_of_ranks_without_elements_are_refused,
            ]
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
