"""Plans on arrays of every element type and library, and invalid arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from execution.example_arrays import (
    MESH,
    Shards,
    cut,
    plan_of,
    random_bits,
    to_torch,
    torch_bits,
)
from oracle import shards_of
from reshard.dtypes import ALL_DTYPES, DType, dtype
from reshard.errors import PlanError, ShardError
from reshard.execution import copies
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.plans.run import run_change, run_rank
from selection import choose
from strategies import layouts_with_contents, shapes

TORCH_DTYPES = [kind for kind in ALL_DTYPES if hasattr(torch, kind.name)]


@pytest.mark.parametrize("kind", ALL_DTYPES, ids=str)
def test_numpy_elements_of_every_type_keep_their_bits(kind: DType) -> None:
    if kind.name == "complex32" and not hasattr(ml_dtypes, kind.name):
        pytest.skip("this ml_dtypes has no complex32")
    plan = plan_of("x, y", "y, x", (6, 9))
    bits = random_bits(kind, (6, 9))
    shards = {rank: part.view(kind.numpy) for rank, part in cut(bits, plan.source).items()}
    result = plan.run(shards)
    expected = cut(bits, plan.target)
    assert result.keys() == expected.keys()
    for rank, array in result.items():
        assert array.dtype == kind.numpy
        assert array.view(kind.storage).tobytes() == expected[rank].tobytes()
        assert array.shape == expected[rank].shape


@pytest.mark.parametrize("kind", TORCH_DTYPES, ids=str)
def test_torch_elements_of_every_type_keep_their_bits(kind: DType) -> None:
    plan = plan_of("x, y", "y, x", (6, 9))
    bits = random_bits(kind, (6, 9))
    shards = {rank: to_torch(part, kind) for rank, part in cut(bits, plan.source).items()}
    result = plan.run(shards)
    for rank, part in cut(bits, plan.target).items():
        assert result[rank].dtype == getattr(torch, kind.name)
        assert torch_bits(result[rank], kind).tobytes() == part.tobytes()


@pytest.mark.parametrize("kind", ["float32", "complex64", "complex128", "bfloat16", "bool"])
def test_torch_views_of_any_strides_are_read_as_they_are(kind: str) -> None:
    plan = plan_of("x, -", "-, y", (6, 9))
    bits = random_bits(dtype(kind), (9, 12))
    whole = to_torch(bits, dtype(kind))
    # Transposed, and every other column.
    seen = whole.T[::2, :]
    shards = {}
    for rank in plan.source.holders:
        (box,) = plan.source.boxes(rank)
        shards[rank] = seen[box.start[0] : box.stop[0]]
        assert not shards[rank].is_contiguous()
    result = plan.run(shards)
    for rank in plan.target.holders:
        (box,) = plan.target.boxes(rank)
        expected = seen[:, box.start[1] : box.stop[1]]
        found = torch_bits(result[rank], dtype(kind)).tobytes()
        assert found == torch_bits(expected.contiguous(), dtype(kind)).tobytes()


def test_numpy_views_of_any_strides_are_read_as_they_are() -> None:
    plan = plan_of("x, -", "-, y", (6, 9))
    seen = np.arange(9 * 12, dtype=np.float32).reshape(9, 12).T[::-2, ::-1]
    shards = cut(seen, plan.source)
    assert not any(shard.flags.c_contiguous for shard in shards.values())
    result = plan.run(shards)
    for rank, part in cut(seen, plan.target).items():
        assert np.array_equal(result[rank], part)


def test_read_only_arrays_and_broadcasts_are_sources_too() -> None:
    plan = plan_of("-, -", "x, y", (6, 9))
    whole = np.broadcast_to(np.arange(9.0), (6, 9))
    result = plan.run(dict.fromkeys(plan.source.holders, whole))
    assert result[2].tolist() == [[6, 7, 8]] * 3


def test_conjugates_and_negatives_are_resolved() -> None:
    plan = plan_of("x", "-", (4,))
    data = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    lazy = data.conj()
    assert lazy.is_conj()
    shards = {rank: lazy[box.start[0] : box.stop[0]] for rank, box in boxes(plan.source).items()}
    assert torch.equal(plan.run(shards)[0], torch.complex(data.real, -data.imag))
    negative = data.conj().imag
    assert negative.is_neg()
    shards = {
        rank: negative[box.start[0] : box.stop[0]] for rank, box in boxes(plan.source).items()
    }
    assert torch.equal(plan.run(shards)[0], -data.imag)


def boxes(layout: Layout) -> dict[int, reshard.Box]:
    return {rank: layout.boxes(rank)[0] for rank in layout.holders}


def test_parameters_are_read_without_their_gradients() -> None:
    plan = plan_of("x", "-", (4,))
    weight = torch.nn.Parameter(torch.arange(4.0))
    shards = {rank: weight[box.start[0] : box.stop[0]] for rank, box in boxes(plan.source).items()}
    assert all(shard.requires_grad for shard in shards.values())
    result = plan.run(shards)
    assert not any(shard.requires_grad for shard in result.values())
    result[0][0] = 99
    assert weight[0] == 0


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_sources_are_untouched_and_nothing_is_shared(module: str) -> None:
    plan = plan_of("x, y", "x, y", (6, 9))
    whole = np.arange(54, dtype=np.float32).reshape(6, 9)
    shards: Shards = cut(whole.copy(), plan.source)
    if module == "torch":
        shards = {rank: torch.from_numpy(shard) for rank, shard in shards.items()}
    result = plan.run(shards)
    for rank, made in result.items():
        assert not np.shares_memory(np.asarray(made), np.asarray(shards[rank]))
        made[...] = -1
    for rank, part in cut(whole, plan.source).items():
        assert np.array_equal(np.asarray(shards[rank]), part)


def test_scalars_and_tensors_without_elements() -> None:
    scalar = plan_of("", "", ())
    result = scalar.run({rank: np.array(rank * 0 + 5) for rank in MESH.devices})
    assert {rank: int(value) for rank, value in result.items()} == dict.fromkeys(MESH.devices, 5)
    assert scalar.run(dict.fromkeys(MESH.devices, np.int64(5)))[0].shape == ()
    empty = plan_of("x, -", "-, y", (4, 0))
    result = empty.run({rank: np.zeros((2, 0), np.int8) for rank in MESH.devices})
    assert {array.shape for array in result.values()} == {(4, 0)}


def test_padding_of_the_target_is_zero_and_of_the_source_unread() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    padded, plain = (reshard.spec(mesh, text).layout((3,)) for text in ("x@pad4", "x"))
    out = reshard.plan(plain, padded).run({0: np.array([1, 2]), 1: np.array([3])})
    assert out[0].tolist() == [1, 2, 3, 0]
    assert out[1].tolist() == [0, 0, 0, 0]
    rubbish = {0: np.array([1, 2, 3, 99]), 1: np.array([99] * 4)}
    back = reshard.plan(padded, plain).run(rubbish)
    assert (back[0].tolist(), back[1].tolist()) == ([1, 2], [3])


ROWS_TO_COLUMNS = plan_of("x, -", "-, x", (4, 4))


def good_shards() -> Shards:
    return {rank: np.zeros((2, 4), np.float32) for rank in MESH.devices}


def replaced(rank: int, array: Any) -> Shards:
    return good_shards() | {rank: array}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (dict, r"no array for rank 0; the source holds data on ranks \[0, 1, 2, 3, 5, 7\]"),
        (
            lambda: {rank: array for rank, array in good_shards().items() if rank != 5},
            r"no array for rank 5; .* got \[0, 1, 2, 3, 7\]",
        ),
        (lambda: {"0": np.zeros((2, 4)), 1: np.zeros((2, 4))}, r"rank 0; .* got \['0', 1\]"),
        (
            lambda: replaced(3, np.zeros((4, 2), np.float32)),
            r"array of rank 3 has shape \[4, 2\], but the source layout has \[2, 4\]",
        ),
        (
            lambda: replaced(3, np.zeros((2, 4), np.float64)),
            "rank 3 is NumpyArrays of float64, that of rank 0 NumpyArrays of float32",
        ),
        (
            lambda: replaced(3, torch.zeros((2, 4))),
            "rank 3 is TorchTensors of float32, that of rank 0 NumpyArrays",
        ),
        (lambda: replaced(3, [[0.0] * 4] * 2), "the array of rank 3 is a list"),
        (
            lambda: replaced(3, np.full((2, 4), None)),
            "the array of rank 3: dtype 'object'",
        ),
        (
            lambda: replaced(3, np.zeros((2, 4), ">f4")),
            "the array of rank 3: .* other order",
        ),
        (
            lambda: {rank: torch.zeros((2, 4), device="meta") for rank in MESH.devices},
            r"a tensor on device meta; .* tensor.cpu\(\)",
        ),
    ],
)
def test_mismatched_arrays_raise(shards: Callable[[], Shards], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        ROWS_TO_COLUMNS.run(shards())


def test_arrays_of_another_dtype_raise() -> None:
    layout = Layout.replicated((2,))
    plan = reshard.plan(layout, layout, dtype="bfloat16")
    with pytest.raises(ShardError, match="arrays of float32 for a plan of bfloat16"):
        plan.run({0: np.zeros(2, np.float32)})


def test_running_an_empty_source_raises() -> None:
    plan = reshard.plan(Layout.whole((2,), [], 1), Layout.replicated((2,)))
    with pytest.raises(ShardError, match="the source layout holds nothing"):
        plan.run({})


def test_a_source_with_a_hole_raises_before_allocation() -> None:
    half = Layout.flat_ranges((4,), {0: (0, 2)})
    with pytest.raises(PlanError, match="only 2 of the 4 elements"):
        reshard.plan(half, Layout.replicated((4,))).run({0: np.zeros(2)})


def test_arrays_of_empty_slots_are_ignored() -> None:
    plan = reshard.plan(Layout.whole((2,), [1], 2), Layout.whole((2,), [0], 1))
    result = plan.run({0: np.zeros(7), 1: np.array([3, 4])})
    assert result.keys() == {0}
    assert result[0].tolist() == [3, 4]


# One target rank at a time gets what all get at once.
CASES = shapes(max_rank=3).flatmap(
    lambda shape: st.tuples(layouts_with_contents(shape), layouts_with_contents(shape))
)


@settings(max_examples=choose(45, 150))
@given(CASES)
def test_rank_by_rank_is_as_at_once(case: Any) -> None:
    (source, contents), (target, _) = case
    change = LayoutChange(source, target)
    random = np.random.default_rng(0)
    dense = [random.integers(1, 5, source.shape) for _ in range(contents.contributions)]
    shards = shards_of(contents, [array.astype(np.float64) for array in dense], rubbish=77.0)
    if not shards:
        return
    expected = run_change(change, shards)
    # By windows and by lists of positions, where few boxes are copied one by one.
    for elements in (1, 1 << 30):
        with (
            patch.object(copies, "_MAX_BOXES", 1),
            patch.object(copies, "_ELEMENTS_FOR_A_WINDOW", elements),
        ):
            found_again = run_change(change, shards)
        for rank, array in found_again.items():
            assert array.tobytes() == expected[rank].tobytes()
    for rank in target.holders:
        found, copied = run_rank(change, rank, shards)
        assert found.tobytes() == expected[rank].tobytes()
        assert found.shape == expected[rank].shape and found.dtype == expected[rank].dtype
        assert copied == change.transfers.elements[change.transfers.target_slot == rank].sum()


def test_contributions_are_combined_scaled_and_filled() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    mean, partial = (reshard.spec(mesh, f"- | {how}(x)").layout((2,)) for how in ("mean", "max"))
    whole = Layout.replicated((2,), 2)
    held = {0: np.array([1.0, 2.0]), 1: np.array([3.0, 8.0])}
    change = LayoutChange(mean, whole)
    assert run_rank(change, 1, held)[0].tolist() == [2, 5]
    change = LayoutChange(whole, partial)
    found = [run_rank(change, rank, held)[0].tolist() for rank in range(2)]
    assert found == [[1, 2], [-np.inf, -np.inf]]


def test_only_senders_are_read() -> None:
    """Of two boxes on one rank, the second is asked for; the other rank's array is not."""
    boxes = [(0, Box((0, 0), (1, 4))), (0, Box((3, 0), (4, 4))), (1, Box((1, 0), (3, 4)))]
    wanted = [(0, Box((3, 0), (4, 4))), (1, Box((0, 0), (3, 4)))]
    change = LayoutChange(*(Layout.from_boxes((4, 4), side) for side in (boxes, wanted)))
    held = {0: np.arange(8), 1: "not an array"}
    found, copied = run_rank(change, 0, held)
    assert found.tolist() == [[4, 5, 6, 7]] and copied == 4


def test_before_copy_is_called_before_every_copy() -> None:
    whole, parts = Layout.whole((4,), [0], 2), reshard.spec(reshard.DeviceMesh.of(x=4), "x")
    change = LayoutChange(parts.layout((4,)), whole)
    seen = []

    def check() -> None:
        seen.append(len(seen))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rank(change, 0, {r: np.zeros(1) for r in range(4)}, check)
    assert seen == [0, 1, 2]
