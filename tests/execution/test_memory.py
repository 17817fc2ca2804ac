"""Arrays that the caller gives to be written: the same result, in place, or an error before."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from execution.example_arrays import MESH, Shards, plan_of
from oracle import NO_ELEMENT, Contents, dense_of, reduced, shards_of
from reshard.collectives import AllReduce, JointAllToAll, Program, find_program
from reshard.dtypes import dtype
from reshard.errors import PlanError, ShardError, UsageError
from reshard.execution import copies, memory
from reshard.execution.memory import FreshMemory, check_apart
from reshard.mesh import Axis
from reshard.notation import parse_ragged
from reshard.plans.hierarchical import StagedJob
from reshard.topology import Topology
from selection import choose
from strategies import movements

RUBBISH = 77.0


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and pieces for a handful of elements, as there are for many MiB."""
    monkeypatch.setattr(copies, "PIECE_BYTES", 24)
    monkeypatch.setattr(copies, "BYTES_FOR_A_THREAD", 8)
    monkeypatch.setattr(copies, "_BYTES_WITHOUT_LOCK", 1)
    monkeypatch.setattr(copies, "_ELEMENTS_FOR_A_WINDOW", 1)
    monkeypatch.setattr(copies, "_MAX_BOXES", 1)


def memory_of(shape: tuple[int, ...], how: str) -> NDArray[np.float64]:
    """An array of some strides, full of rubbish."""
    if how == "by columns":
        return np.full(shape[::-1], RUBBISH).T
    if how == "every other":
        wide = np.full([2 * size for size in shape], RUBBISH)
        return wide[(..., *(slice(None, None, 2) for _ in shape))]
    if how == "backwards":
        return np.full(shape, RUBBISH)[(..., *(slice(None, None, -1) for _ in shape))]
    return np.full(shape, RUBBISH)


def check_padding(contents: Contents, found: Shards) -> None:
    for slot, array in found.items():
        assert not array[contents.elements[slot] == NO_ELEMENT].any()


MEMORY = st.sampled_from(["by rows", "by columns", "every other", "backwards"])


@pytest.mark.usefixtures("tiny_pieces")
@settings(max_examples=choose(60, 200))
@given(movements(), MEMORY, MEMORY, st.sampled_from([1, 2, 5]))
def test_given_arrays_and_threads_change_nothing(
    case: Any, source_memory: str, target_memory: str, threads: int
) -> None:
    (source, before), (target, after) = case
    random = np.random.default_rng(0)
    count = before.contributions
    dense = [random.integers(1, 5, source.shape).astype(float) for _ in range(count)]
    shards = {}
    for slot, array in shards_of(before, dense, rubbish=RUBBISH).items():
        shards[slot] = memory_of(array.shape, source_memory)
        shards[slot][...] = array
    if not shards:
        return
    plan = reshard.plan(source, target)
    expected = plan.run(shards, threads=1)
    out = {s: memory_of(array.shape, target_memory) for s, array in expected.items()}
    found = plan.run(shards, out, threads)
    assert found.keys() == out.keys()
    for slot, array in found.items():
        assert array is out[slot]
        assert array.tobytes() == expected[slot].tobytes()
    check_padding(after, found)
    np.testing.assert_allclose(dense_of(after, found), reduced(before.reduction, dense))


ROWS_TO_COLUMNS = plan_of("x, -", "-, x", (4, 4))


def rows() -> Shards:
    return {rank: np.zeros((2, 4), np.float32) for rank in MESH.devices}


def columns(**other: Any) -> Shards:
    good: Shards = {rank: np.ones((4, 2), np.float32) for rank in MESH.devices}
    return good | {int(rank[1:]): array for rank, array in other.items()}


def read_only() -> NDArray[Any]:
    array = np.zeros((4, 2), np.float32)
    array.flags.writeable = False
    return array


def once_for_each_row() -> NDArray[Any]:
    return np.lib.stride_tricks.as_strided(np.zeros(5, np.float32), (4, 2), (4, 4))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (dict, r"no array for rank 0 in out; the target holds data on ranks \[0, 1, 2, 3, 5, 7\]"),
        (
            lambda: columns(r3=np.zeros((2, 4), np.float32)),
            r"rank 3 in out has shape \[2, 4\], but the target layout has \[4, 2\]",
        ),
        (
            lambda: columns(r3=np.zeros((4, 2), np.float64)),
            "rank 3 in out is NumpyArrays of float64, the sources are NumpyArrays of float32",
        ),
        (lambda: columns(r3=torch.zeros((4, 2))), "rank 3 in out is TorchTensors of float32"),
        (lambda: columns(r3=[[0.0, 0.0]] * 4), "rank 3 in out is a list"),
        (lambda: columns(r3=read_only()), "rank 3 in out is read-only"),
        (lambda: columns(r3=once_for_each_row()), "rank 3 in out has several elements at the"),
    ],
)
def test_arrays_that_cannot_be_written_to_are_refused(
    out: Callable[[], Shards], message: str
) -> None:
    with pytest.raises(ShardError, match=message):
        ROWS_TO_COLUMNS.run(rows(), out())


def test_a_scalar_that_is_no_array_cannot_be_written() -> None:
    plan = plan_of("", "", ())
    with pytest.raises(ShardError, match="for rank 0 in out is read-only"):
        plan.run(
            dict.fromkeys(MESH.devices, np.float32(1)), dict.fromkeys(MESH.devices, np.float32(0))
        )


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_tensors_that_torch_computes_on_reading_cannot_be_written(
    lazy: Callable[[Any], Any],
) -> None:
    layout = reshard.Layout.replicated((3,))
    target = lazy(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ShardError, match="conjugate or negative"):
        reshard.plan(layout, layout).run({0: torch.zeros(3, dtype=target.dtype)}, {0: target})


def test_memory_that_two_arrays_share_is_refused_before_a_byte_is_written() -> None:
    held = rows()
    twice = columns(r3=held[5].reshape(4, 2))
    with pytest.raises(ShardError, match=r"rank 3 in out shares memory with the source of rank 5"):
        ROWS_TO_COLUMNS.run(held, twice)
    one = np.zeros((4, 3), np.float32)
    with pytest.raises(ShardError, match=r"rank (1|7) in out shares memory with .* rank (1|7) in"):
        ROWS_TO_COLUMNS.run(rows(), columns(r1=one[:, :2], r7=one[:, 1:]))
    same = dict.fromkeys(MESH.devices, one[:, :2])
    with pytest.raises(ShardError, match="shares memory"):
        ROWS_TO_COLUMNS.run(rows(), same)
    assert all((array == 1).all() for rank, array in twice.items() if rank != 3)
    assert not one.any()


def test_columns_of_one_array_are_apart() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    plan = reshard.plan(*(reshard.spec(mesh, text).layout((4, 4)) for text in ("x, -", "-, x")))
    whole, dense = np.zeros((4, 4), np.int64), np.arange(16).reshape(4, 4)
    # The source is one array, too, and stands between the columns of the target.
    both = np.zeros((4, 8), np.int64)
    both[:, 1::2] = dense
    source = {0: both[:2, 1::2], 1: both[2:, 1::2]}
    plan.run(source, {0: whole[:, :2], 1: whole[:, 2:]})
    assert np.array_equal(whole, dense)
    plan.run(source, {0: both[:, 0:4:2], 1: both[:, 4:8:2]})
    assert np.array_equal(both[:, ::2], dense)


@st.composite
def views_of(draw: st.DrawFn, memory: NDArray[np.int64]) -> NDArray[np.int64]:
    begin, stop = sorted(draw(st.tuples(*[st.integers(0, len(memory))] * 2)))
    row = memory[begin:stop]
    if len(row) % 4 == 0 and draw(st.booleans()):
        grid = row.reshape(-1, 4)[:, draw(st.integers(0, 2)) :]
        return draw(st.sampled_from([grid, grid.T, grid[::-2], grid[:, ::-2]]))
    return row[:: draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))]


@settings(max_examples=choose(90, 300))
@given(st.data())
def test_arrays_that_share_an_element_are_found(data: st.DataObject) -> None:
    memory = np.arange(16)
    written, read = (data.draw(st.lists(views_of(memory), max_size=3)) for _ in range(2))
    named = [[(f"{k}{i}", view) for i, view in enumerate(views)]
             for k, views in (("written ", written), ("read ", read))]  # fmt: skip
    elements = [set(view.reshape(-1).tolist()) for view in [*written, *read]]
    pairs = itertools.combinations(range(len(elements)), 2)
    if any(a < len(written) and elements[a] & elements[b] for a, b in pairs):
        with pytest.raises(ShardError, match=r"^written . shares memory with"):
            check_apart(*named)
    else:
        check_apart(*named)


def test_two_arrays_too_entangled_to_tell_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reshard.execution.memory._MAX_ATTEMPTS", 1)
    memory = np.zeros(3000, np.int8)
    view = np.lib.stride_tricks.as_strided
    layout = reshard.Layout.replicated((7, 7, 7))
    source = view(memory[1:], (7, 7, 7), (150, 21, 2))
    target = view(memory, (7, 7, 7), (170, 23, 3))
    with pytest.raises(ShardError, match=r"(shares memory with|takes too long to find out)"):
        reshard.plan(layout, layout).run({0: source}, {0: target})


def test_torch_tensors_are_written_in_place() -> None:
    dense = torch.arange(16, dtype=torch.bfloat16).reshape(4, 4)
    plan = reshard.plan(ROWS_TO_COLUMNS.source, ROWS_TO_COLUMNS.target, dtype("bfloat16"))
    held, out = {}, {}
    weight = torch.nn.Parameter(torch.zeros((2, 4), dtype=torch.bfloat16))
    for rank in MESH.devices:
        (box,) = plan.source.boxes(rank)
        held[rank] = dense[box.start[0] : box.stop[0]]
        # By columns, and one that is learned.
        out[rank] = torch.zeros((2, 4), dtype=torch.bfloat16).T
    out[3] = weight.T
    found = plan.run(held, out)
    for rank in MESH.devices:
        (box,) = plan.target.boxes(rank)
        assert found[rank] is out[rank]
        assert torch.equal(found[rank], dense[:, box.start[1] : box.stop[1]])
    assert torch.equal(weight.T, out[3])


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True, np.int64(0)])
def test_invalid_numbers_of_threads_are_refused(threads: Any) -> None:
    out = columns()
    with pytest.raises(UsageError, match="threads="):
        ROWS_TO_COLUMNS.run(rows(), out, threads)
    assert all((array == 1).all() for array in out.values())


def test_a_number_of_threads_may_be_numpys() -> None:
    found = ROWS_TO_COLUMNS.run(rows(), columns(), threads=np.int64(2))  # type: ignore[arg-type]
    assert not any(array.any() for array in found.values())


# Jobs and programs.


@pytest.mark.parametrize(
    ("arrays", "out", "message"),
    [
        (None, None, "shards is a NoneType; give arrays by tensor and rank"),
        ({"b": {}, 1: {}}, None, r"no arrays for tensor 'a'; got \['b', 1\]"),
        ({"a": {}}, None, "no array of 'a' for rank 0; the source holds data on ranks"),
        ({"a": [np.zeros(2)]}, None, "shards of 'a' is a list"),
        ({"a": rows() | {3: np.zeros(2)}}, None, r"the array of rank 3 of 'a' has shape \[2\]"),
        ({"a": rows() | {3: None}}, None, "the array of rank 3 of 'a' is a NoneType"),
        (
            {"a": {rank: torch.zeros((2, 4), device="meta") for rank in MESH.devices}},
            None,
            "the array of rank 0 of 'a' is a tensor on device meta",
        ),
        (
            {"a": {rank: array.astype(int) for rank, array in rows().items()}},
            None,
            "arrays of 'a' of int64 for a plan of float32",
        ),
        ({"a": rows()}, [columns()], "out is a list; give arrays by tensor and rank"),
        ({"a": rows()}, {"b": columns(), 1: {}}, r"'a' in out; got \['b', 1\]"),
        ({"a": rows()}, {"a": {}}, "no array of 'a' for rank 0 in out"),
    ],
)
def test_arrays_that_do_not_fit_a_job_are_refused_by_the_tensors_name(
    arrays: Any, out: Any, message: str
) -> None:
    source, target = ROWS_TO_COLUMNS.source, ROWS_TO_COLUMNS.target
    item = reshard.JobItem.between_ranks("a", dtype("float32"), source, target)
    job = reshard.Job([item])
    with pytest.raises(ShardError, match=message):
        job.run(arrays, out)
    if out is None:
        staged = StagedJob(job, Topology.of(hosts=4, ranks_per_host=2))
        with pytest.raises(ShardError, match=message):
            staged.run(arrays)


def test_a_job_writes_to_given_arrays_of_all_its_tensors() -> None:
    source, target = ROWS_TO_COLUMNS.source, ROWS_TO_COLUMNS.target
    items = [
        reshard.JobItem.between_ranks(n, dtype(k), source, target)
        for n, k in (("a", "float32"), ("b", "int8"))
    ]
    job = reshard.Job(items)
    dense = np.arange(16).reshape(4, 4)
    arrays, out = {}, {}
    for item in items:
        whole = dense.astype(item.dtype.name)
        start = reshard.plan(reshard.Layout.whole((4, 4), [0], 8), source)
        arrays[item.name] = start.run({0: whole})
        out[item.name] = {r: np.ones((4, 2), item.dtype.name) for r in target.holders}
    expected = job.run(arrays, threads=1)
    found = job.run(arrays, out, threads=2)
    for name, of_ranks in found.items():
        assert of_ranks.keys() == expected[name].keys()
        for rank, array in of_ranks.items():
            assert array is out[name][rank] and np.array_equal(array, expected[name][rank])
    with pytest.raises(ShardError, match=r"no arrays for tensor 'b' in out; got \['a'\]"):
        job.run(arrays, {"a": out["a"]})
    with pytest.raises(ShardError, match=r"the array of 'b' for rank 0 in out is .* of float32"):
        job.run(arrays, {"a": out["a"], "b": out["a"]})
    # What is one tensor's source must not be another's target.
    shared = arrays["a"][0].view(np.int8).reshape(-1)[:8].reshape(4, 2)
    message = "'b' for rank 3 in out shares memory with the source of 'a' on rank 0"
    with pytest.raises(ShardError, match=message):
        job.run(arrays, {**out, "b": {**out["b"], 3: shared}})


PROGRAMS = [
    ("x, y", "y, x"),
    ("x y, -", "-, y"),
    ("x, -", "y, -"),
    ("-, - | sum(y)", "x, -"),
    ("x, - | sum(y)", "x, y"),
    ("x, y", "x, y"),
]


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize(("before", "after"), PROGRAMS)
@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_a_program_writes_to_given_arrays(
    before: str, after: str, stepwise: bool, module: str
) -> None:
    shape = (12, 18)
    source, target = reshard.spec(MESH, before), reshard.spec(MESH, after)
    program = find_program(source, target, shape)
    whole = reshard.Layout.whole(shape, [0], 8)
    start = reshard.plan(whole, source.layout(shape))
    end = reshard.plan(whole, target.layout(shape))
    dense = np.arange(216.0).reshape(shape)
    held, expected = (plan.run({0: dense}) for plan in (start, end))
    if module == "torch":
        held = {rank: torch.from_numpy(array) for rank, array in held.items()}
    out = {rank: np.full(array.shape, RUBBISH) for rank, array in expected.items()}
    given = {r: torch.from_numpy(a) for r, a in out.items()} if module == "torch" else out
    found = program.run(held, given, threads=2, stepwise=stepwise)
    for rank, array in found.items():
        assert array is given[rank]
        assert np.array_equal(out[rank], expected[rank])
    with pytest.raises(ShardError, match=r"for rank \d in out shares memory"):
        program.run(held, {**given, 5: given[7].reshape(out[5].shape)}, stepwise=stepwise)
    if held[0].shape == out[5].shape:
        with pytest.raises(ShardError, match=r"for rank 5 in out .* the source of rank 0"):
            program.run(held, {**given, 5: held[0]}, stepwise=stepwise)
    with pytest.raises(ShardError, match="no array for rank 0 in out"):
        program.run(held, {}, stepwise=stepwise)


@settings(max_examples=choose(18, 60))
@given(st.data())
def test_a_direct_copy_has_the_result_of_the_steps(data: st.DataObject) -> None:
    texts = ["x, y", "y, x", "x y, -", "y x, -", "-, x y", "x, -", "-, y", "-, -", "-, y x"]
    before, after = (data.draw(st.sampled_from(texts)) for _ in range(2))
    shape = tuple(data.draw(st.tuples(*[st.integers(0, 13)] * 2)))
    source, target = reshard.spec(MESH, before), reshard.spec(MESH, after)
    program = find_program(source, target, shape)
    dense = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    held = reshard.plan(reshard.Layout.whole(shape, [0], 8), source.layout(shape)).run({0: dense})
    at_once, by_steps = program.run(held), program.run(held, stepwise=True)
    assert at_once.keys() == by_steps.keys()
    assert all(np.array_equal(at_once[rank], by_steps[rank]) for rank in at_once)


def test_stepwise_a_step_outside_its_group_is_found_out() -> None:
    shape, mesh = (4, 6), reshard.DeviceMesh.of(x=2, y=2)
    source, target = reshard.spec(mesh, "x, y"), reshard.spec(mesh, "y, x")
    # The group along y has the same rows everywhere.
    program = Program(shape, source, target, (JointAllToAll(shape, source, target, (Axis("y"),)),))
    held = {rank: np.zeros((2, 3)) for rank in range(4)}
    with pytest.raises(PlanError, match="only 0 of the 6"):
        program.run(held, stepwise=True)


def test_contributions_are_combined_in_the_order_of_the_steps() -> None:
    mesh, shape = reshard.DeviceMesh.of(x=2, y=2), (3,)
    specs = [reshard.spec(mesh, text) for text in ("- | sum(x y)", "- | sum(x)", "-")]
    steps = [
        AllReduce(shape, before, after, (Axis(axis),))
        for before, after, axis in zip(specs, specs[1:], "yx", strict=False)
    ]
    program = Program(shape, specs[0], specs[2], tuple(steps))
    held = {rank: np.full(3, [1e20, 1.0, -1e20, 1.0][rank]) for rank in range(4)}
    direct = reshard.plan(*(specs[i].layout(shape) for i in (0, 2))).run(held)
    assert direct[0].tolist() == [1] * 3
    for found in (program.run(held), program.run(held, stepwise=True)):
        assert {rank: array.tolist() for rank, array in found.items()} == {
            rank: [0] * 3 for rank in range(4)
        }


def test_stages_fill_arrays_with_padding() -> None:
    """The relays' arrays are new memory, too, and what is padding there is zero."""
    mesh = reshard.DeviceMesh.of(host=2, gpu=2)
    source, target = (reshard.spec(mesh, t).layout((6,)) for t in ("host gpu", "gpu@pad4"))
    job = reshard.Job([reshard.JobItem.between_ranks("a", dtype("int64"), source, target)])
    staged = StagedJob(job, Topology.of(hosts=2, ranks_per_host=2))
    held = {
        "a": {0: np.array([1, 2]), 1: np.array([3, 4]), 2: np.array([5, 6]), 3: np.zeros(0, int)}
    }
    found = staged.run(held)["a"]
    assert {rank: array.tolist() for rank, array in found.items()} == {
        0: [1, 2, 3, 4], 1: [5, 6, 0, 0], 2: [1, 2, 3, 4], 3: [5, 6, 0, 0]
    }  # fmt: skip


def test_arrays_that_have_no_slots_are_refused() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    sides = reshard.spec(mesh, "x, -"), reshard.spec(mesh, "-, x")
    arrays = [np.zeros((2, 4)), np.zeros((2, 4))]
    shards = dict(enumerate(arrays))
    for moves in (
        reshard.plan(*(side.layout((4, 4)) for side in sides)),
        find_program(*sides, (4, 4)),
    ):
        with pytest.raises(ShardError, match="shards is a list"):
            moves.run(arrays)  # type: ignore[attr-defined]
        with pytest.raises(ShardError, match="out is a ndarray"):
            moves.run(shards, out=np.zeros((2, 4, 2)))  # type: ignore[attr-defined]


def test_a_masked_array_is_refused() -> None:
    shards = rows()
    shards[0] = np.ma.masked_array(shards[0], mask=True)
    with pytest.raises(ShardError, match="the array of rank 0 is masked"):
        ROWS_TO_COLUMNS.run(shards)


def test_ranks_without_elements_need_no_array() -> None:
    """Neither as a source nor in `out`; of a tensor without elements one array shows the type."""
    ragged = parse_ragged("RaggedShard((0,), (0, 1))", shape=(4, 2))
    rows = reshard.spec(reshard.DeviceMesh.of(x=2), "x, -").layout((4, 2))
    whole = np.arange(8).reshape(4, 2)
    there = reshard.plan(ragged, rows, dtype="int64").run({1: whole})
    assert np.array_equal(np.concatenate([there[0], there[1]]), whole)

    back = reshard.plan(rows, ragged, dtype="int64")
    out = {1: np.zeros_like(whole)}
    assert back.run(there, out=out).keys() == {1} and np.array_equal(out[1], whole)
    # An array that is given is looked at all the same.
    with pytest.raises(ShardError, match="rank 0 has shape"):
        reshard.plan(ragged, rows, dtype="int64").run({0: np.zeros((1, 2), "int64"), 1: whole})
    with pytest.raises(ShardError, match="no array for rank 1"):
        reshard.plan(ragged, rows, dtype="int64").run({0: np.zeros((0, 2), "int64")})

    empty = reshard.spec(reshard.DeviceMesh.of(x=2), "x, -").layout((0, 2))
    plan = reshard.plan(empty, empty, dtype="int64")
    assert plan.run({1: np.zeros((0, 2), "int64")})[0].shape == (0, 2)
    with pytest.raises(ShardError, match="no array for rank 0"):
        plan.run({})


MIB = 1 << 20
ONLY_ON_LINUX = pytest.mark.linux_only(reason="large pages on demand")


@pytest.fixture
def every_array_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE_ARRAY_BYTES", 1)


@pytest.fixture
def arrays_of_4_mib_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE_ARRAY_BYTES", 4 * MIB)


def slow_clock(monkeypatch: pytest.MonkeyPatch, page_s: float) -> None:
    ticks: Iterator[float] = (tick * page_s for tick in itertools.count())
    monkeypatch.setattr(memory.time, "thread_time", lambda: next(ticks))


def smaps_of(array: NDArray[Any]) -> tuple[str, int]:
    """The flags of the mapping an array begins in, and how many KiB of it are there."""
    address, is_its, resident_kib = array.__array_interface__["data"][0], False, -1
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            is_its = low <= address < high
        elif is_its and first == "Rss:":
            resident_kib = int(rest.split()[0])
        elif is_its and first == "VmFlags:":
            return rest, resident_kib
    raise LookupError(hex(address))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 11), (2 * MIB + 1, 3), (1, 9 * MIB)])
@pytest.mark.parametrize("kind", [np.uint8, np.complex64])
def test_arrays_are_dense_writable_and_apart(shape: tuple[int, ...], kind: type) -> None:
    memory = FreshMemory()
    arrays = [memory.array(shape, np.dtype(kind)) for _ in range(3)]
    memory.find(threads=2)
    for number, array in enumerate(arrays):
        assert (array.shape, array.dtype) == (shape, np.dtype(kind))
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()
    check_apart([("one", array) for array in arrays], [])


@ONLY_ON_LINUX
@pytest.mark.usefixtures("arrays_of_4_mib_are_large")
def test_large_arrays_begin_at_a_large_page_and_are_there() -> None:
    memory = FreshMemory()
    array = memory.array((5 * MIB,), np.dtype(np.uint8))
    assert array.__array_interface__["data"][0] % (2 * MIB) == 0
    flags, resident_kib = smaps_of(array)
    assert "hg" in flags.split()
    assert resident_kib == 0
    memory.find(threads=1)
    flags, resident_kib = smaps_of(array)
    if "nh" not in flags.split():
        assert resident_kib == 4 * 1024


@ONLY_ON_LINUX
def test_smaller_arrays_are_memory_that_the_process_may_have_already() -> None:
    memory = FreshMemory()
    small, large = (memory.array((size,), np.dtype(np.uint8)) for size in (32 * MIB - 1, 32 * MIB))
    assert small.base is None
    assert large.base is not None


@ONLY_ON_LINUX
@pytest.mark.parametrize("threads", [1, 3])
def test_where_large_pages_are_slow_the_rest_is_small(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    slow_clock(monkeypatch, page_s=0.01)
    memory = FreshMemory()
    array = memory.array((48 * MIB,), np.dtype(np.uint8))
    memory.find(threads)
    flags, found_kib = smaps_of(array)
    assert "nh" in flags.split()
    # Each thread ends the page that it is at.
    assert 3 * 2 * 1024 <= found_kib <= (3 + threads - 1) * 2 * 1024
    array[...] = 1
    assert smaps_of(array)[1] >= 48 * 1024


@ONLY_ON_LINUX
@pytest.mark.usefixtures("arrays_of_4_mib_are_large")
def test_where_they_are_quick_all_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_clock(monkeypatch, page_s=1e-5)
    memory = FreshMemory()
    arrays = [memory.array((8 * MIB,), np.dtype(np.uint8)) for _ in range(2)]
    memory.find(threads=2)
    for array in arrays:
        flags, resident_kib = smaps_of(array)
        assert "hg" in flags.split()
        assert resident_kib == 8 * 1024


@ONLY_ON_LINUX
@pytest.mark.usefixtures("arrays_of_4_mib_are_large")
@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_memory_is_freed_with_the_last_array_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            made = super().__new__(cls, *arguments, **options)
            mappings.append(weakref.ref(made))
            return made

    monkeypatch.setattr(mmap, "mmap", Mapping)
    plan = plan_of("x, -", "-, y", (1024, 4 * 1024))
    shards: dict[int, Any] = {rank: np.ones((512, 4 * 1024), np.float64) for rank in MESH.devices}
    if module == "torch":
        shards = {rank: torch.from_numpy(array) for rank, array in shards.items()}
    rows = {rank: array[-1] for rank, array in plan.run(shards).items()}
    for left in range(6, 0, -1):
        gc.collect()
        assert sum(mapping() is not None for mapping in mappings) == left
        _, row = rows.popitem()
        assert (row == 1).all()
        del row
    gc.collect()
    assert not any(mapping() for mapping in mappings)


@pytest.mark.parametrize("lacking", ["advice", "pages", "room"])
def test_systems_without_large_pages(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            if lacking == "room":
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, *arguments, **options)

        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    if lacking == "advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "mmap", Mapping)
    memory = FreshMemory()
    array = memory.array((8 * MIB,), np.dtype(np.uint8))
    memory.find(threads=2)
    array[...] = 1
    assert array.flags.owndata


def test_arrays_larger_than_memory_are_a_memory_error() -> None:
    for shape in ((1 << 60,), (1 << 46,)):
        with pytest.raises(MemoryError):
            FreshMemory().array(shape, np.dtype(np.uint32))


@pytest.mark.usefixtures("every_array_is_large")
@pytest.mark.parametrize("page_s", [0.0, 0.01])
def test_plans_jobs_and_stages_in_such_memory(
    monkeypatch: pytest.MonkeyPatch, page_s: float
) -> None:
    slow_clock(monkeypatch, page_s)
    mesh = reshard.DeviceMesh.of(host=2, gpu=2)
    source, target = (reshard.spec(mesh, t).layout((6, 3)) for t in ("host gpu, -", "gpu@pad4, -"))
    dense = np.arange(18, dtype=np.float32).reshape(6, 3)
    padded = np.concatenate([dense, np.zeros((2, 3), np.float32)])
    held = reshard.plan(reshard.Layout.whole((6, 3), [0], 1), source).run({0: dense})
    job = reshard.Job([reshard.JobItem.between_ranks("a", dtype("float32"), source, target)])
    staged = StagedJob(job, Topology.of(hosts=2, ranks_per_host=2))
    for found in (
        reshard.plan(source, target).run(held),
        job.run({"a": held})["a"],
        staged.run({"a": held})["a"],
    ):
        for rank in range(4):
            expected = padded[4 * (rank % 2) : 4 * (rank % 2) + 4]
            assert np.array_equal(found[rank], expected)
