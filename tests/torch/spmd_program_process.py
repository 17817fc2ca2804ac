"""One rank of a job that runs programs: ranks agree once on all movements of a run.

Arguments: how many operations ahead movements begin, for each of which programs run.
"""

from __future__ import annotations

import functools
import itertools
import sys
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
from rank_cases import report_each
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, MeshError, PlanError, ReshardError, RunError, UsageError
from reshard.topology import Device, Link, Topology
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.programs.run import ProgramRun
from selection import choose
from spmd.compiled_runs import find_runs

MESH = DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])
DATA = np.arange(48.0).reshape(8, 6)
STRATEGIES = choose(("basic",), ("eager", "basic", "cost"))
# Far below the group's timeout of 60 s.
SOON_S = 20.0
FAILING = {"here": False}


@contextmanager
def counted_rounds() -> Iterator[list[int]]:
    """How often ranks ask each other inside."""
    found, plain = [0], RankGroup.allreduce_max

    def counting(self: RankGroup, numbers: Any) -> list[int]:
        found[0] += 1
        return plain(self, numbers)

    RankGroup.allreduce_max = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        RankGroup.allreduce_max = plain  # type: ignore[method-assign]


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


def a_program_agrees_at_its_start_and_end_only(overlap: int) -> None:
    """A program agrees at its begin and at its end; movement by movement each agrees."""
    jitted = sp.jit(moved_twice, overlap=overlap)
    expected = moved_twice(given()).to_dense()
    first = jitted(given())
    with counted_rounds() as alone:
        eager = moved_twice(given())
    with counted_rounds() as together:
        again = jitted(given())
    # One sharding is asked for twice, and an array keeps what it was moved to.
    assert (alone[0], together[0]) == (7, 2), (alone, together)
    for one in (first, eager, again):
        np.testing.assert_array_equal(one.to_dense(), expected)


def loops_inside_programs_give_the_same(overlap: int) -> None:
    """What a loop does inside a program agrees by itself: all of it gives the same."""

    def function(x: Any) -> Any:
        x = moved_twice(x)
        x, _ = sp.scan(lambda c, _: (moved_twice(c) / 64.0, None), x, length=3)
        return moved_twice(x)

    expected = function(given()).to_dense()
    jitted = sp.jit(function, overlap=overlap)
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


def a_failure_inside_a_program_is_raised_on_all_ranks(overlap: int) -> None:
    """One rank fails inside a program: all others raise its cause soon, and all go on after it."""
    own = sp.operator("([i, j]) -> ([i, j])", fails_here, name="failing")
    jitted = sp.jit(lambda x: moved_twice(own(moved_twice(x))), overlap=overlap)
    expected = jitted(given()).to_dense()
    np.testing.assert_array_equal(jitted(given()).to_dense(), expected)
    FAILING["here"] = dist.get_rank() == 1
    kind, part = (UsageError, "had enough") if dist.get_rank() == 1 else (RunError, "had enough")
    expect(kind, part, lambda: jitted(given()))
    FAILING["here"] = False
    np.testing.assert_array_equal(jitted(given()).to_dense(), expected)


def different_programs_are_refused_before_elements_move(overlap: int) -> None:
    """Ranks that run other programs learn so before anything moves."""
    programs = sp.jit(moved_twice, overlap=overlap), sp.jit(moved_otherwise, overlap=overlap)
    for one in programs:
        one(given())
    mine = programs[dist.get_rank() == 2]
    expect(PlanError, "'the program'", lambda: mine(given()))
    for one, function in zip(programs, (moved_twice, moved_otherwise), strict=True):
        np.testing.assert_array_equal(one(given()).to_dense(), function(given()).to_dense())


def infinite_factors_are_found_by_all_ranks(overlap: int) -> None:
    """Elements for which the program is not right: all ranks find out, and none counts as lost."""
    left = np.array([[3.0, -1.0], [0.5, 7.0]])
    jitted = sp.jit(lambda a, b, c: (a @ b) * c, overlap=overlap)
    for last in (1.0, 2.0, np.inf, 1.0):
        factor = np.array([[1.0, 2.0], [3.0, last]])
        arrays = (
            sp.array(left, spec(MESH, "-, x")),
            sp.array(np.ones((2, 2)), spec(MESH, "x, -")),
            sp.array(factor, spec(MESH, "-, y")),
        )
        found = jitted(*arrays).to_dense()
        np.testing.assert_array_equal(found, (left @ np.ones((2, 2))) * factor)


def programs_of_two_threads_keep_one_order(overlap: int) -> None:
    """Programs of two threads at once: each has all its movements to itself, in one order."""
    programs = [sp.jit(moved_twice, overlap=overlap), sp.jit(moved_otherwise, overlap=overlap)]
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


def trained(weights: list[Any], x: Any) -> Any:
    """Weights are gathered where they are used, and their slopes reduced, as with ZeRO 3."""
    rows, whole = spec(MESH, "x y, -"), spec(MESH, "-, -")

    def loss(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = sp.tanh(x @ w.shard(whole))
        return sp.sum(x * x)

    return sp.value_and_grad(loss, specs=[rows] * len(weights))(weights, x)


@contextmanager
def movement_threads() -> Iterator[list[str]]:
    """The threads in which movements run inside."""
    found: list[str] = []
    plain = ProgramRun.finish

    def finish(self: ProgramRun) -> None:
        found.append(threading.current_thread().name)
        plain(self)

    ProgramRun.finish = finish  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ProgramRun.finish = plain  # type: ignore[method-assign]


def overlapped_programs_give_the_same_bits_in_the_least_memory() -> None:
    """The same bits in every order, from movements in a thread of their own; the least memory."""
    random = np.random.default_rng(0)
    x = sp.array(random.normal(size=(16, 8)), spec(MESH, "x y, -"))
    count = choose(3, 5)
    weights = [sp.array(random.normal(size=(8, 8)), spec(MESH, "x y, -")) for _ in range(count)]
    expected = sp.jit(trained)(weights, x)
    for overlap in choose((2,), (1, 2, 5)):
        program = sp.jit(trained, overlap=overlap)
        program(weights, x)
        with movement_threads() as threads, torch.no_grad():
            found = program(weights, x)
        assert threads.count("reshard movements") >= count, threads
        for one, right in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
            assert one.spec is right.spec
            np.testing.assert_array_equal(one.to_dense(), right.to_dense())
    # What is between movements may be compiled, whatever backend compiles it.
    weights = choose(weights[:1], weights)
    expected = sp.jit(trained)(weights, x)
    program = sp.jit(trained, overlap=2, compile="eager")
    for _ in range(2):
        found = program(weights, x)
    for one, right in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-12)
    # Nobody is left.
    assert all(one.name != "reshard movements" for one in threading.enumerate())


def decomposed_products_give_the_same_results() -> None:
    """Products in pieces beside what moves: the same results, by more and smaller movements."""
    rows, whole = spec(MESH, "x y, -"), spec(MESH, "-, -")

    def function(x: Any, up: Any, down: Any) -> Any:
        return (sp.tanh(x).shard(whole) @ up @ down).shard(rows)

    random = np.random.default_rng(0)
    shapes = (((32, 8), rows), ((8, 16), spec(MESH, "-, x y")), ((16, 8), rows))
    arrays = [sp.array(random.normal(size=shape), one) for shape, one in shapes]
    # Messages and products take about as long.
    device = Device(1e9, (("float64", 4e6),))
    topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e6), device=device)
    expected = sp.jit(function)(*arrays).to_dense()
    for overlap in choose((2,), (1, 2)):
        program = sp.jit(function, overlap=overlap, topology=topology)
        program(*arrays)
        with movement_threads() as threads:
            found = program(*arrays)
        np.testing.assert_allclose(found.to_dense(), expected, rtol=1e-12, atol=1e-12)
        moves = sum(len(list(one.reshards)) for one in program.trace(*arrays).operations)
        assert len(threads) == moves > 2, (threads, moves)


def the_memory_of_a_run_stays_within_the_peak_of_the_trace() -> None:
    """What is in registers of a run stays within the peak of the trace, and comes near to it."""
    random = np.random.default_rng(0)
    x = sp.array(random.normal(size=(16, 64)), spec(MESH, "x y, -"))
    weights = [sp.array(random.normal(size=(64, 64)), spec(MESH, "x y, -")) for _ in range(5)]
    peaks = []
    for overlap in choose((0, 3), (0, 1, 3)):
        program = sp.jit(trained, overlap=overlap)
        program(weights, x)
        ((_, recorded),) = program._programs.items()
        most = [0]
        runs = find_runs(recorded)

        def watched(run: Any, most: list[int] = most) -> Any:
            def watching(values: list[Any]) -> None:
                run(values)
                tensors = [
                    one
                    for shards in values
                    if isinstance(shards, tuple)
                    for one in shards
                    if isinstance(one, torch.Tensor)
                ]
                storages = {
                    one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors
                }
                most[0] = max(most[0], sum(one.nbytes() for one in storages.values()))

            return watching

        runs[:] = [(watched(run), frees) for run, frees in runs]
        program(weights, x)
        stated = program.trace(weights, x).peak_bytes[dist.get_rank()]
        assert most[0] <= stated, (overlap, most[0], stated)
        # What movements under way have made is in no register yet.
        assert overlap or most[0] > 0.7 * stated, (most[0], stated)
        peaks.append(stated)
    assert peaks[0] < peaks[-1], peaks


def gradients_of_pytorch_pass_through_overlapped_movements() -> None:
    """PyTorch's own gradients go through movements that run in another thread."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(3, 8, 8))
    cut, whole = spec(MESH, "x y, -"), spec(MESH, "-, -")

    def loss(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = sp.tanh(x @ w.shard(whole))
        return sp.sum(x * x)

    x = sp.array(random.normal(size=(16, 8)), cut)
    slopes = []
    for overlap in (0, 2):
        own = [sp.array(w, cut).shards[dist.get_rank()].clone().requires_grad_() for w in weights]
        program = sp.jit(loss, overlap=overlap)
        for _ in range(2):
            given = [sp.from_shards({dist.get_rank(): one}, (8, 8), cut) for one in own]
            found = torch.autograd.grad(program(given, x).to_dense(), own)
        slopes.append(found)
    for one, right in zip(*slopes, strict=True):
        assert right.abs().max() > 0
        torch.testing.assert_close(one, right, rtol=0, atol=0)


def a_failed_movement_is_raised_on_all_ranks() -> None:
    """A movement that fails in its thread, on one rank: all learn its cause soon, and go on."""
    program = sp.jit(moved_twice, overlap=2)
    expected = program(given()).to_dense()
    plain = ProgramRun.finish
    count = [0]

    def finish(self: ProgramRun) -> None:
        count[0] += 1
        if count[0] == 2:
            raise MemoryError("no room for it")
        plain(self)

    kind: type[Exception] = RunError
    if dist.get_rank() == 3:
        ProgramRun.finish = finish  # type: ignore[method-assign]
        kind = MemoryError
    begin_s = time.monotonic()
    with pytest.raises(kind, match="no room for it"):
        program(given())
    assert time.monotonic() - begin_s < SOON_S
    ProgramRun.finish = plain  # type: ignore[method-assign]
    np.testing.assert_array_equal(program(given()).to_dense(), expected)


def meshes_of_the_same_ranks_may_differ() -> None:
    """Meshes of the same ranks, in other orders and with other axes, eagerly and in programs."""
    four = DeviceMesh.of(z=4)
    weight = sp.array(torch.arange(36.0, dtype=torch.float64).reshape(6, 6), spec(four, "-, z"))

    def function(x: Any, weight: Any) -> Any:
        moved = sp.sin(x).shard(spec(four, "z, -"))
        pending = (moved.shard(spec(four, "-, z")) @ weight.shard(spec(four, "z, -")) / 10.0).shard(
            spec(MESH, "y, x")
        )
        return sp.sum(sp.square(pending + x.shard(spec(MESH, "y, x"))))

    def dense(x: Any, weight: Any) -> Any:
        return torch.sum(torch.square(torch.sin(x) @ weight / 10.0 + x))

    leaves = [torch.tensor(DATA).requires_grad_(), weight.to_dense().clone().requires_grad_()]
    expected = dense(*leaves)
    expected.backward()
    step = sp.value_and_grad(function, argnums=(0, 1))
    for strategy in STRATEGIES:
        for overlap in choose((2,), (0, 2)):
            jitted = sp.jit(step, strategy=strategy, overlap=overlap)
            for _ in range(2):
                value, slopes = jitted(given(), weight)
                np.testing.assert_allclose(value.to_dense(), expected.detach(), rtol=1e-12)
                for slope, leaf in zip(slopes, leaves, strict=True):
                    np.testing.assert_allclose(slope.to_dense(), leaf.grad, rtol=1e-12)
    # PyTorch's own gradients go back between them too.
    own = torch.tensor(DATA).requires_grad_()
    function(sp.array(own, spec(MESH, "x, y")), weight).to_dense().backward()
    np.testing.assert_allclose(own.grad, leaves[0].grad, rtol=1e-12)
    # Where each shard is another rank's, every element moves.
    whole = sp.array(torch.arange(4.0), spec(four, "z"))
    there = whole.shard(spec(MESH, "x y"))
    assert float(there.shards[dist.get_rank()][0]) == float([1, 3, 0, 2][dist.get_rank()])


def programs_read_arrays_they_are_not_given() -> None:
    """A program reads arrays that it is not given, of which a process has its own shards alone."""
    there = DeviceMesh.of(z=1, devices=[2])
    for number, text in enumerate(("x, y", "-, -", "-, x | sum(y)")):
        w = sp.array(DATA / 9, spec(MESH, "x, y")).shard(spec(MESH, text))
        alone = sp.array(DATA / 7, spec(there, "-, -"))

        def function(x: Any, w: Any = w, alone: Any = alone) -> Any:
            doubled = (alone * alone).shard(spec(MESH, "x, y"))
            return sp.sum(sp.sin(x * w) @ sp.matrix_transpose(w) * sp.sum(doubled + x))

        value, slope = sp.value_and_grad(function)(given())
        for strategy in STRATEGIES:
            for overlap in choose((0, 2)[number % 2 :][:1], (0, 2)):
                step = sp.jit(sp.value_and_grad(function), strategy=strategy, overlap=overlap)
                for _ in range(2):
                    again, its = step(given())
                    np.testing.assert_allclose(again.to_dense(), value.to_dense(), rtol=1e-12)
                    np.testing.assert_allclose(its.to_dense(), slope.to_dense(), 1e-11, 1e-12)


def ranks_outside_a_mesh_take_part_in_programs() -> None:
    """Stages on meshes of other ranks: who has no part of an array joins what all do."""
    first, second = DeviceMesh.of(x=2), DeviceMesh("later", (3,), ("y",), (3, 1, 2))
    random = np.random.default_rng(5)
    data = [random.normal(size=shape) for shape in ((6, 4), (4, 5), (5, 3))]
    cuts = [spec(first, "x, -"), spec(first, "-, x"), spec(second, "y, -")]

    def function(x: Any, w: Any, v: Any) -> Any:
        # Contributions over a part of the processes, a norm and a sort there, and back again.
        hidden = sp.rms_norm(sp.tanh(x.shard(spec(first, "-, x")) @ w.shard(spec(first, "x, -"))))
        there = hidden.shard(spec(second, "-, y"))
        made = sp.silu(there @ v) * sp.max(there)
        back = sp.sum(made * 2.0, axis=0).shard(spec(first, "x"))
        return sp.sum(sp.square(back)) + 1.0

    with sp.running(sp.in_process("numpy")):
        expected = sp.value_and_grad(function, (0, 1, 2))(*map(sp.array, data, cuts))
        expected = [one.to_dense() for one in (expected[0], *expected[1])]
    arrays = [sp.array(one, cut) for one, cut in zip(data, cuts, strict=True)]
    rank = dist.get_rank()
    assert set(arrays[0].shards) == ({rank} if rank < 2 else set())
    step = sp.value_and_grad(function, (0, 1, 2))
    steps = [step] + [
        sp.jit(step, strategy=strategy, overlap=overlap)
        for strategy, overlap in choose(
            (("eager", 0), ("basic", 2)), itertools.product(("eager", "basic"), (0, 2))
        )
    ]
    for run in steps:
        for _ in range(3):
            value, slopes = run(*arrays)
            for one, right in zip((value, *slopes), expected, strict=True):
                np.testing.assert_allclose(one.to_dense(), right, 1e-11, 1e-12)
            assert all(a.spec is b.spec for a, b in zip(slopes, arrays, strict=True))
    # From the shards that there are, and to any other ranks.
    own = {rank: torch.full((2,), float(rank))} if rank in second.devices else {}
    moved = sp.from_shards(own, (6,), spec(second, "y"), dtype="float32")
    assert moved.shard(spec(first, "x")).to_dense().tolist() == [3.0] * 2 + [1.0] * 2 + [2.0] * 2
    for index, what in enumerate(data[0]):
        found = sp.array(what, spec(second, "y"))
        order = np.argsort(what)
        assert sp.argsort(found).to_dense().tolist() == order.tolist(), index
        values, places = sp.top_k(found.shard(spec(second, "-")), 2)
        assert places.to_dense().tolist() == order[::-1][:2].tolist()
        assert values.shape == (2,)
    # What elements decide on some ranks, all learn of: an infinite factor, a wrong index.
    pending = sp.array(np.ones((3, 4)), spec(first, "-, x")) @ sp.array(
        np.array([[1.0], [1.0], [1.0], [-1.0]]), spec(first, "x, -")
    )
    for number in (2.0, np.inf):
        factor = sp.array(np.full((3, 1), number), spec(first, "-, -"))
        assert (pending * factor).to_dense().ravel().tolist() == [2.0 * number] * 3
    with pytest.raises(ArrayIndexError, match="7"):
        sp.take(arrays[2].shard(spec(second, "-, -")), sp.array([7]), axis=0)
    # PyTorch's gradients would not come back.
    leaf = torch.ones(6, requires_grad=True)
    with pytest.raises(UsageError, match="without some of the processes"):
        sp.array(leaf, spec(first, "x"))
    with pytest.raises(MeshError, match="none of 4 processes"):
        sp.array(data[0], spec(DeviceMesh.of(w=5), "w, -"))
    with pytest.raises(MeshError, match="use a mesh of all processes"):
        sp.expert_routing(sp.array([0, 1], spec(first, "x")), 2)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with sp.running(sp.over_processes()):
        report_each(
            [
                meshes_of_the_same_ranks_may_differ,
                programs_read_arrays_they_are_not_given,
                ranks_outside_a_mesh_take_part_in_programs,
                overlapped_programs_give_the_same_bits_in_the_least_memory,
                decomposed_products_give_the_same_results,
                the_memory_of_a_run_stays_within_the_peak_of_the_trace,
                gradients_of_pytorch_pass_through_overlapped_movements,
                a_failed_movement_is_raised_on_all_ranks,
            ]
        )
        for overlap in map(int, sys.argv[1:]):
            report_each(
                functools.update_wrapper(functools.partial(check, overlap), check)
                for check in (
                    a_program_agrees_at_its_start_and_end_only,
                    loops_inside_programs_give_the_same,
                    infinite_factors_are_found_by_all_ranks,
                    programs_of_two_threads_keep_one_order,
                    different_programs_are_refused_before_elements_move,
                    a_failure_inside_a_program_is_raised_on_all_ranks,
                )
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
