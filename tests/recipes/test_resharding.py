"""The strategy contract: plans as slices by rank, and executions that end well, or tell why not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import reshard
from reshard.checkpoint.processes import OneProcess
from reshard.dtypes import dtype
from reshard.errors import PlanError, RecipeError, ReshardError, RunError, ShardError, UsageError
from reshard.layout import Box, Layout
from reshard.recipes import strategies
from reshard.recipes.resharding import (
    ReshardingPlan,
    ReshardingResult,
    ReshardingStrategy,
    TensorMetadata,
    TensorRedistribution,
    TensorSlice,
    create_strategy,
)
from selection import choose, keep_alternate

Shards = dict[int, dict[str, Any]]
Metadata = dict[str, TensorMetadata]
SHAPES = {"w": (7, 4), "b": (3,), "cube": (4, 3, 2), "empty": (0, 2), "scalar": (), "one": (1, 5)}
DTYPES = ("float32", "int8", "complex64", "bool", "float16", "int64")


def dense_model() -> dict[str, NDArray[Any]]:
    """Tensors of many shapes and types."""
    random = np.random.default_rng(0)
    return {
        name: np.asarray(random.standard_normal(shape) * 9).astype(kind)
        for (name, shape), kind in zip(SHAPES.items(), DTYPES, strict=True)
    }


def cut(dense: Mapping[str, NDArray[Any]], layouts: Mapping[str, Layout], ranks: int) -> Shards:
    """Each rank's part of dense arrays, box by box."""
    found: Shards = {rank: {} for rank in range(ranks)}
    for name, layout in layouts.items():
        for rank in layout.holders:
            # A tensor without elements has no box, and is whole on a rank.
            (box,) = layout.boxes(rank) or [Box((0,) * layout.ndim, layout.shape)]
            window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            found[rank][name] = np.array(dense[name][window])
    return found


def laid_out(dense: Mapping[str, NDArray[Any]], policy: str, ranks: int) -> dict[str, Layout]:
    tensors = {name: (dtype(array.dtype), array.shape) for name, array in dense.items()}
    return strategies.strategy(policy)(tensors, ranks)


def described(dense: Mapping[str, NDArray[Any]], layouts: Mapping[str, Layout]) -> Metadata:
    return {name: TensorMetadata(dense[name].dtype, layouts[name]) for name in dense}


def expect_equal(found: Mapping[int, Mapping[str, Any]], expected: Mapping[int, Any]) -> None:
    assert {rank: set(named) for rank, named in found.items()} == {
        rank: set(named) for rank, named in expected.items()
    }
    for rank, named in expected.items():
        for name, array in named.items():
            assert found[rank][name].dtype == array.dtype
            np.testing.assert_array_equal(found[rank][name], array)


def rows(length: int, ranks: int) -> TensorMetadata:
    mesh = reshard.DeviceMesh.of(x=ranks)
    return TensorMetadata("float32", reshard.spec(mesh, "x, -").layout((length, 2)))


def whole(shape: tuple[int, ...], rank: int, ranks: int) -> TensorMetadata:
    return TensorMetadata("float32", Layout.whole(shape, [rank], ranks))


def one_process(name: str) -> ReshardingStrategy:
    return create_strategy(name, OneProcess())


def slice_of_rows(rank: int, start: int, stop: int) -> TensorSlice:
    return TensorSlice(rank, (start, 0), (stop, 2), (stop - start, 2))


def test_simple_assigns_whole_tensors_to_target_ranks_in_turn() -> None:
    metadata = {"a": whole((2, 3), 0, 2), "b": whole((4,), 1, 2), "c": whole((), 1, 2)}
    plan = one_process("simple").create_plan(metadata, 2)
    assert plan.tensor_redistributions == (
        TensorRedistribution("a", 0, (2, 3), (0,), (TensorSlice(0, (0, 0), (2, 3), (2, 3)),)),
        TensorRedistribution("b", 1, (4,), (1,), (TensorSlice(1, (0,), (4,), (4,)),)),
        TensorRedistribution("c", 1, (), (0,), (TensorSlice(0, (), (), ()),)),
    )
    assert (plan.source_world_size, plan.target_world_size) == (2, 2)


def test_parallel_cuts_rows_over_more_ranks() -> None:
    """Ten rows over two ranks are 0 to 5 and 5 to 10; over four 0, 3, 6, 9 to 10."""
    plan = one_process("parallel").create_plan({"a": rows(10, 2)}, 4)
    assert plan.tensor_redistributions == (
        TensorRedistribution(
            "a", 0, (5, 2), (0, 1), (slice_of_rows(0, 0, 3), slice_of_rows(1, 3, 5))
        ),
        TensorRedistribution(
            "a",
            1,
            (5, 2),
            (1, 2, 3),
            (slice_of_rows(1, 0, 1), slice_of_rows(2, 1, 4), slice_of_rows(3, 4, 5)),
        ),
    )


def test_parallel_cuts_rows_over_fewer_ranks_and_writes_scalars_once() -> None:
    """Over two ranks, of three: rank 1 of the source has rows 2 and 3, one for either."""
    metadata = {"a": rows(5, 3), "s": TensorMetadata("int8", Layout.replicated((), 3))}
    plan = one_process("parallel").create_plan(metadata, 2)
    assert plan.tensor_redistributions == (
        TensorRedistribution("a", 0, (2, 2), (0,), (slice_of_rows(0, 0, 2),)),
        TensorRedistribution(
            "a", 1, (2, 2), (0, 1), (slice_of_rows(0, 0, 1), slice_of_rows(1, 1, 2))
        ),
        TensorRedistribution("a", 2, (1, 2), (1,), (slice_of_rows(1, 0, 1),)),
        # Every source rank has the scalar; one gives it.
        TensorRedistribution("s", 0, (), (0,), (TensorSlice(0, (), (), ()),)),
    )


def test_targets_that_receive_nothing_are_not_listed() -> None:
    """Two rows over four ranks: the last two get none."""
    plan = one_process("parallel").create_plan({"a": rows(2, 1)}, 4)
    assert plan.target_ranks("a") == [0, 1]
    result = one_process("parallel").execute(plan, [{"a": np.zeros((2, 2), np.float32)}])
    assert {rank: list(named) for rank, named in result.target_shards.items()} == {
        0: ["a"],
        1: ["a"],
        2: [],
        3: [],
    }
    assert result.warnings == ["target ranks that hold nothing: 2, 3"]


def test_tensors_without_elements_are_listed_too() -> None:
    metadata = {"e": TensorMetadata("int8", Layout.whole((0, 2), [1], 2))}
    for name, rank in (("simple", 0), ("parallel", 0)):
        plan = one_process(name).create_plan(metadata, 3)
        assert plan.tensor_redistributions == (
            TensorRedistribution(
                "e", 1, (0, 2), (rank,), (TensorSlice(rank, (0, 0), (0, 2), (0, 2)),)
            ),
        )
        assert (plan.source_rank("e"), plan.target_ranks("e")) == (1, [rank])


def test_slices_are_in_the_order_of_target_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of one's own gives the last rows to the first rank."""

    def backwards(
        tensors: strategies.Tensors, ranks: int, config: strategies.Config | None = None
    ) -> dict[str, Layout]:
        mesh = reshard.DeviceMesh.of(x=ranks, devices=range(ranks)[::-1])
        return {n: reshard.spec(mesh, "x, -").layout(shape) for n, (_, shape) in tensors.items()}

    monkeypatch.setattr(strategies, "_strategies", dict(strategies._strategies))
    strategies.register_strategy("backwards", backwards)
    plan = create_strategy("Backwards").create_plan({"a": rows(4, 1)}, 2)
    (given,) = plan.tensor_redistributions
    assert given.slices == (slice_of_rows(0, 2, 4), slice_of_rows(1, 0, 2))
    assert given.target_ranks == (0, 1)


def test_look_ups_by_name() -> None:
    plan = one_process("parallel").create_plan({"a": rows(5, 3), "s": whole((), 2, 3)}, 2)
    assert (plan.source_rank("a"), plan.source_ranks("a")) == (0, [0, 1, 2])
    assert plan.target_ranks("a") == [0, 1]
    assert (plan.source_rank("s"), plan.target_ranks("s")) == (2, [0])
    assert [one.source_rank for one in plan.redistributions("a")] == [0, 1, 2]
    for absent in ("", "b", "A"):
        assert plan.source_rank(absent) is None
        assert plan.target_ranks(absent) == []
        assert plan.source_ranks(absent) == [] and plan.redistributions(absent) == []


def test_slices_of_a_rank_that_has_several_boxes_are_of_each_box() -> None:
    boxes = [(0, Box((0, 0), (1, 2))), (0, Box((3, 0), (5, 2))), (1, Box((1, 0), (3, 2)))]
    metadata = {"a": TensorMetadata("float32", Layout.from_boxes((5, 2), boxes))}
    plan = one_process("simple").create_plan(metadata, 1)
    assert [(r.source_rank, r.source_shape, r.slices) for r in plan.tensor_redistributions] == [
        (0, (1, 2), (slice_of_rows(0, 0, 1),)),
        (0, (2, 2), (slice_of_rows(0, 0, 2),)),
        (1, (2, 2), (slice_of_rows(0, 0, 2),)),
    ]
    dense = np.arange(10, dtype=np.float32).reshape(5, 2)
    held = [{"a": dense[[0, 3, 4]].ravel()}, {"a": dense[1:3]}]
    result = one_process("simple").execute(plan, held)
    np.testing.assert_array_equal(result.target_shards[0]["a"], dense)


@pytest.mark.parametrize(
    ("name", "source"),
    keep_alternate(
        ["simple", "balanced", "sharded", "parallel"],
        range(1, 6),
        "a strategy on another number of ranks",
    ),
)
def test_n_ranks_to_m_ranks(name: str, source: int) -> None:
    dense = dense_model()
    for target in range(1, 6, choose(2, 1)):
        for policy in ("simple", "parallel"):
            layouts = laid_out(dense, policy, source)
            held = cut(dense, layouts, source)
            kept = {rank: dict(named) for rank, named in cut(dense, layouts, source).items()}
            strategy = one_process(name)
            plan = strategy.create_plan(described(dense, layouts), target)
            result = strategy.execute(plan, held)
            expect_equal(result.target_shards, cut(dense, laid_out(dense, name, target), target))
            assert result.success and result.duration_s > 0
            assert result.copied_bytes == sum(array.nbytes for array in dense.values())
            expect_equal(held, kept)
            # Every slice is what its target gets: put together, they are the tensor.
            for tensor, array in dense.items():
                sizes = [
                    int(np.prod(one.shape))
                    for given in plan.redistributions(tensor)
                    for one in given.slices
                ]
                assert sum(sizes) == array.size
            # And back, from the result.
            back = strategy.create_plan(described(dense, laid_out(dense, name, target)), source)
            again = strategy.execute(back, result.target_shards)
            expect_equal(again.target_shards, cut(dense, laid_out(dense, name, source), source))


def test_slices_select_the_elements_that_the_source_sends() -> None:
    dense = np.arange(20, dtype=np.float32).reshape(10, 2)
    strategy = one_process("parallel")
    plan = strategy.create_plan({"a": rows(10, 3)}, 4)
    held = cut({"a": dense}, {"a": rows(10, 3).layout}, 3)
    found: dict[int, list[NDArray[Any]]] = {rank: [] for rank in range(4)}
    for given in plan.tensor_redistributions:
        array = held[given.source_rank]["a"]
        assert array.shape == given.source_shape
        for one in given.slices:
            window = tuple(slice(a, b) for a, b in zip(one.start, one.stop, strict=True))
            found[one.target_rank].append(array[window])
    for rank, expected in strategy.execute(plan, held).target_shards.items():
        np.testing.assert_array_equal(np.concatenate(found[rank]), expected["a"])


def test_a_checkpoint_s_tensors_are_metadata(tmp_path: Any) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.arange(12.0).reshape(6, 2)}, tmp_path / "model.safetensors")
    opened = reshard.checkpoint.open(tmp_path)
    plan = one_process("parallel").create_plan(opened.tensors, 3)
    assert plan.source_world_size == 1 and plan.target_ranks("w") == [0, 1, 2]


def test_torch_tensors_become_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    dense = torch.arange(10, dtype=torch.bfloat16).reshape(5, 2)
    metadata = {"a": TensorMetadata(torch.bfloat16, rows(5, 2).layout)}
    strategy = one_process("parallel")
    result = strategy.execute(
        strategy.create_plan(metadata, 3), [{"a": dense[:3]}, {"a": dense[3:]}]
    )
    assert torch.equal(result.target_shards[1]["a"], dense[2:4])


def test_strategies_by_name() -> None:
    assert create_strategy("SIMPLE").coordinator is None
    assert ReshardingStrategy(strategies.strategy("simple")) == create_strategy("simple")
    process = OneProcess()
    parallel = strategies.strategy("parallel")
    assert create_strategy("Parallel", process) == ReshardingStrategy(parallel, process, 4)
    assert create_strategy("balanced").policy.name == "balanced"
    with pytest.raises(RecipeError, match="unknown strategy 'simpel'") as told:
        create_strategy("simpel")
    for name in strategies.strategy_names():
        assert name in str(told.value)
    with pytest.raises(UsageError, match="'PARALLEL' needs a coordinator"):
        create_strategy("PARALLEL")
    with pytest.raises(UsageError, match="threads 0 must be at least 1"):
        ReshardingStrategy(parallel, process, threads=0)
    with pytest.raises(UsageError, match="world size 0"):
        one_process("simple").create_plan({}, 0)


@pytest.mark.parametrize(
    ("metadata", "ranks", "said"),
    [
        ({"a": rows(4, 2)}, 2.5, "target world size 2.5 must be a whole number"),
        ({"a": rows(4, 2)}, "2", "target world size '2' must be a whole number"),
        ({"a": rows(4, 2)}, True, "target world size True must be a whole number"),
        ({"a": rows(4, 2)}, -1, "target world size -1 must be at least 1"),
        ({"a": np.zeros(3)}, 2, "of tensor 'a'; give TensorMetadata"),
        ({"a": TensorMetadata("float32", (4, 2))}, 2, "of tensor 'a'; give TensorMetadata"),
        ([rows(4, 2)], 2, "metadata of type list; give a mapping"),
    ],
    ids=str,
)
def test_invalid_arguments_of_plans_are_refused(metadata: Any, ranks: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        one_process("simple").create_plan(metadata, ranks)
    layouts = {"a": (dtype("float32"), (4, 2))}
    assert strategies.strategy("simple")(layouts, np.int64(2))["a"].slots == 2
    with pytest.raises(UsageError, match=r"world size 2\.5 must be a whole number"):
        strategies.strategy("simple")(layouts, 2.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"threads 1\.5 must be a whole number"):
        ReshardingStrategy(strategies.strategy("parallel"), threads=1.5)  # type: ignore[arg-type]


BOTH = pytest.mark.parametrize("name", ["simple", "parallel"])


@BOTH
def test_arrays_that_do_not_fit_are_found_before_any_is_copied(name: str) -> None:
    strategy = one_process(name)
    plan = strategy.create_plan({"a": rows(4, 2), "b": rows(4, 2)}, 3)
    good = {"a": np.zeros((2, 2), np.float32), "b": np.zeros((2, 2), np.float32)}
    for wrong, words in (
        ({"a": good["a"]}, "no array of tensor 'b' on source rank 1"),
        (good | {"b": np.zeros((3, 2), np.float32)}, r"tensor 'b': .*shape \[3, 2\]"),
        (good | {"b": np.zeros((2, 2), np.float64)}, "tensor 'b': .*float64"),
        (good | {"b": [[0, 0], [0, 0]]}, "tensor 'b': .*a list"),
    ):
        with pytest.raises(ShardError, match=words):
            strategy.execute(plan, [good, wrong])
    with pytest.raises(ShardError, match="no array of tensor 'a' on source rank 1"):
        strategy.execute(plan, [good])
    result = strategy.execute(plan, {0: good, 1: good | {"more": 1, "still more": 2}})
    (told, *_) = result.warnings
    assert told.endswith("metadata does not name them: more, still more") and result.success


@BOTH
def test_a_plan_written_by_hand_is_not_carried_out(name: str) -> None:
    plan = ReshardingPlan(1, 1, (TensorRedistribution("a", 0, (2,), (0,), ()),))
    assert plan.source_rank("a") == 0 and plan.target_ranks("a") == [0]
    with pytest.raises(PlanError, match="written by hand"):
        one_process(name).execute(plan, [{"a": np.zeros(2)}])


class After:
    """Says to stop from its `boxes`-th question on."""

    def __init__(self, boxes: int) -> None:
        self.boxes = boxes
        self.asked = 0
        self.lock = threading.Lock()

    def is_set(self) -> bool:
        with self.lock:
            self.asked += 1
            return self.asked > self.boxes


def small() -> tuple[Metadata, Shards, dict[str, NDArray[Any]]]:
    names = ("a", "b", "c")
    dense = {n: np.arange(8, dtype=np.float32).reshape(4, 2) + 10 * i for i, n in enumerate(names)}
    metadata = {name: rows(4, 2) for name in names}
    return metadata, cut(dense, {n: m.layout for n, m in metadata.items()}, 2), dense


def test_a_cancelled_run_keeps_and_reports_complete_arrays() -> None:
    """Each of three tensors goes to one rank in two boxes; before each it is asked, and once
    more before each tensor."""
    metadata, held, dense = small()
    strategy = one_process("simple")
    plan = strategy.create_plan(metadata, 2)
    kept = {rank: {n: a.copy() for n, a in named.items()} for rank, named in held.items()}
    for boxes, complete in ((0, {}), (2, {}), (3, {0: ["a"]}), (6, {0: ["a", "c"]})):
        result = strategy.execute(plan, held, After(boxes))
        found = {rank: list(named) for rank, named in result.target_shards.items()}
        assert found == {0: [], 1: []} | complete
        assert not result.success
        count = len(complete.get(0, []))
        assert f"cancelled with {count} of 3 arrays complete" in result.warnings[-1]
        assert "the source is as it was" in result.warnings[-1]
        assert ("of target rank 0 a" in result.warnings[-1]) == (count == 1)
        assert ("all of target ranks 0" in result.warnings[-1]) == (count == 2)
        for named in result.target_shards.values():
            for name, array in named.items():
                np.testing.assert_array_equal(array, dense[name])
        assert result.copied_bytes == 32 * count
    expect_equal(held, kept)
    result = strategy.execute(plan, held, After(9))
    assert result.success and result.warnings == []


@BOTH
def test_asynchronous_execution(name: str) -> None:
    metadata, held, _ = small()
    strategy = one_process(name)
    plan = strategy.create_plan(metadata, 3)

    async def run() -> ReshardingResult:
        return await strategy.execute_async(plan, held)

    result = asyncio.run(run())
    expect_equal(result.target_shards, strategy.execute(plan, held).target_shards)
    assert result.success

    async def stopped() -> ReshardingResult:
        return await strategy.execute_async(plan, held, After(0))

    assert not asyncio.run(stopped()).success


class Waiting:
    """Lets nothing begin before it is told to, and never says to stop."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def is_set(self) -> bool:
        self.has_begun.set()
        assert self.may_go_on.wait(20)
        return False


@BOTH
def test_a_cancelled_task_reports_its_progress(name: str) -> None:
    metadata, held, _ = small()
    strategy = one_process(name)
    plan = strategy.create_plan(metadata, 3)
    kept = {rank: {n: a.copy() for n, a in named.items()} for rank, named in held.items()}
    waiting = Waiting()

    async def run() -> None:
        task = asyncio.create_task(strategy.execute_async(plan, held, waiting))
        await asyncio.to_thread(waiting.has_begun.wait, 20)
        task.cancel()
        # The event loop goes on while the work ends.
        await asyncio.sleep(0)
        assert not task.done()
        waiting.may_go_on.set()
        await task

    with pytest.raises(asyncio.CancelledError, match=r"cancelled with 0 of .* arrays complete"):
        asyncio.run(run())
    expect_equal(held, kept)


@BOTH
def test_errors_in_the_background_are_raised(name: str) -> None:
    metadata, held, _ = small()
    del held[1]["b"]
    strategy = one_process(name)
    plan = strategy.create_plan(metadata, 3)
    with pytest.raises(ShardError, match="no array of tensor 'b' on source rank 1"):
        asyncio.run(strategy.execute_async(plan, held))


class Meeting:
    """Several coordinators in threads of this process, each as of a process of its own."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size

    def members(self) -> list[Member]:
        return [Member(self, rank) for rank in range(len(self.values))]


class Member:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.values)

    def collect(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        found = list(self.meeting.values)
        self.meeting.barrier.wait()
        return found


Outcome = ReshardingResult | ReshardError


def together(size: int, run: Callable[[ReshardingStrategy], ReshardingResult]) -> list[Outcome]:
    """What several processes get that run the same, or what they raise."""

    def outcome(member: Member) -> Outcome:
        try:
            return run(create_strategy("parallel", member))
        except ReshardError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(outcome, Meeting(size).members()))


def results(outcomes: list[Outcome]) -> list[ReshardingResult]:
    found = [one for one in outcomes if isinstance(one, ReshardingResult)]
    assert len(found) == len(outcomes), outcomes
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_processes_share_the_target_ranks(size: int) -> None:
    dense = {"a": np.arange(96, dtype=np.float32).reshape(48, 2), "b": np.arange(24.0)}
    layouts = laid_out(dense, "parallel", 3)
    held = cut(dense, layouts, 3)

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        return strategy.execute(strategy.create_plan(described(dense, layouts), 12), held)

    found = results(together(size, run))
    merged = {rank: named for one in found for rank, named in one.target_shards.items()}
    assert list(merged) == list(range(12))
    expect_equal(merged, cut(dense, laid_out(dense, "parallel", 12), 12))
    # 576 bytes over 12 ranks are 48 a rank.
    shares = [len(one.target_shards) for one in found]
    assert [one.copied_bytes for one in found] == [48 * share for share in shares]
    assert max(shares) == -(-12 // size)
    assert all(one.success and one.warnings == [] for one in found)


def test_a_process_that_cannot_stops_all_of_them() -> None:
    metadata, held, _ = small()
    wrong = {0: held[0], 1: {"a": held[1]["a"], "c": held[1]["c"]}}

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        own = wrong if strategy.coordinator.rank == 1 else held
        return strategy.execute(strategy.create_plan(metadata, 4), own)

    first, second, third = together(3, run)
    assert isinstance(second, ShardError)
    for other in (first, third):
        assert isinstance(other, RunError)
        assert str(other).startswith("nothing was copied: process 1 failed: ShardError(")
        assert "no array of tensor 'b'" in str(other)


def test_a_process_that_fails_on_the_way_stops_all_of_them() -> None:
    """Even by an error that is none of ours: the others do not wait for it."""
    metadata, held, _ = small()

    class Broken:
        def is_set(self) -> bool:
            raise OSError("the disk is gone")

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        stop = Broken() if strategy.coordinator.rank == 1 else None
        try:
            return strategy.execute(strategy.create_plan(metadata, 4), held, stop)
        except OSError as error:
            raise ReshardError("its own") from error

    first, second = together(2, run)
    assert isinstance(first, RunError) and str(second) == "its own"
    assert str(first) == (
        "the target ranks of other processes are not complete: process 1 failed: "
        "OSError('the disk is gone')"
    )


def test_processes_with_different_plans_copy_nothing() -> None:
    metadata, held, _ = small()

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        ranks = 4 if strategy.coordinator.rank == 1 else 3
        return strategy.execute(strategy.create_plan(metadata, ranks), held)

    for outcome in together(2, run):
        assert isinstance(outcome, PlanError) and "nothing was copied" in str(outcome)


def test_a_process_that_is_cancelled_is_named_to_the_others() -> None:
    metadata, held, _ = small()

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        stop = After(0) if strategy.coordinator.rank == 1 else None
        return strategy.execute(strategy.create_plan(metadata, 4), held, stop)

    first, second = results(together(2, run))
    assert not first.success and not second.success
    assert first.warnings == ["process 1 was cancelled; its target ranks are not complete"]
    assert {rank: list(named) for rank, named in first.target_shards.items()} == {
        0: ["a", "b", "c"],
        1: ["a", "b", "c"],
    }
    assert "cancelled with 0 of 6 arrays complete" in second.warnings[-1]


def test_runs_that_are_begun_at_once_take_turns() -> None:
    """The second run is cancelled in one process while it waits, and the third comes after it."""
    metadata, held, dense = small()

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        plans = [strategy.create_plan(metadata, ranks) for ranks in (4, 3, 2)]

        async def begin_all() -> list[ReshardingResult | BaseException]:
            tasks = [asyncio.create_task(strategy.execute_async(plan, held)) for plan in plans]
            await asyncio.sleep(0)
            if strategy.coordinator.rank == 0:
                tasks[1].cancel()
            await asyncio.wait(tasks)
            outcomes: list[ReshardingResult | BaseException] = []
            for task in tasks:
                try:
                    outcomes.append(await task)
                except asyncio.CancelledError as error:
                    outcomes.append(error)
            return outcomes

        first, second, third = asyncio.run(begin_all())
        assert isinstance(first, ReshardingResult) and first.success
        if strategy.coordinator.rank == 0:
            assert isinstance(second, asyncio.CancelledError)
            assert str(second).startswith("cancelled with 0 of 6 arrays complete")
        else:
            assert isinstance(second, ReshardingResult)
            assert second.warnings[-1].startswith("process 0 was cancelled; its target ranks")
        assert isinstance(third, ReshardingResult)
        return third

    found = results(together(2, run))
    merged = {rank: named for one in found for rank, named in one.target_shards.items()}
    expect_equal(merged, cut(dense, laid_out(dense, "parallel", 2), 2))


def test_runs_in_another_order_copy_nothing() -> None:
    metadata, held, _ = small()

    def run(strategy: ReshardingStrategy) -> ReshardingResult:
        ranks = (3, 4) if strategy.coordinator.rank else (4, 3)
        plans = [strategy.create_plan(metadata, number) for number in ranks]

        async def begin_both() -> list[ReshardingResult | BaseException]:
            runs = [strategy.execute_async(plan, held) for plan in plans]
            return await asyncio.gather(*runs, return_exceptions=True)

        for outcome in asyncio.run(begin_both()):
            assert isinstance(outcome, PlanError) and "begin their runs in the same order" in str(
                outcome
            )
        return strategy.execute(strategy.create_plan(metadata, 2), held)

    assert all(result.success for result in results(together(2, run)))
