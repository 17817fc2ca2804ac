"""torch tensors whose memory is not there, or cannot be shared, are refused and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from execution.example_arrays import MESH, Shards, plan_of
from reshard.errors import ShardError

ROWS_TO_COLUMNS = plan_of("x, -", "-, x", (4, 4))


def rows() -> Shards:
    return {rank: torch.ones((2, 4)) for rank in MESH.devices}


def columns() -> Shards:
    return {rank: torch.zeros((4, 2)) for rank in MESH.devices}


def freed(*shape: int) -> torch.Tensor:
    """What FSDP leaves of a parameter that it keeps sharded: its shape."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_off(*shape: int) -> torch.Tensor:
    """A tensor whose memory lacks its last element."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(4 * tensor.numel() - 4)
    return tensor


class Wrapper(torch.Tensor):
    """A shape whose elements are elsewhere, as DTensor is."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented


def wrapper(*shape: int) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(Wrapper, shape)  # type: ignore[attr-defined]
    return made


BAD = [
    (freed, "is a tensor whose memory was freed: 32 bytes are missing"),
    (cut_off, "is a tensor whose memory was freed: 4 bytes are missing"),
    (wrapper, r"is a Wrapper whose memory cannot be shared \(.*\); give a plain tensor"),
    (lambda *shape: torch.ones(shape, device="meta"), "is a tensor on device meta"),
    (lambda *shape: torch.ones(shape).to_sparse(), "is a tensor of layout torch.sparse_coo"),
    (
        lambda *_: torch.nn.UninitializedParameter(),
        "is a UninitializedParameter without a shape",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_a_source_without_memory_is_refused(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ShardError, match=f"the array of rank 3 {message}"):
        ROWS_TO_COLUMNS.run(rows() | {3: make(2, 4)})


@pytest.mark.parametrize(("make", "message"), BAD)
def test_a_target_without_memory_is_refused_before_a_byte_is_written(
    make: Callable[..., Any], message: str
) -> None:
    out = columns()
    with pytest.raises(ShardError, match=f"the array for rank 3 in out {message}"):
        ROWS_TO_COLUMNS.run(rows(), out | {3: make(4, 2)})
    assert not any(array.any() for array in out.values())


def test_tensors_that_fill_their_memory_to_the_end_are_taken() -> None:
    """Views from the middle to the last byte, and what has no elements and no memory."""
    held = {rank: torch.arange(12.0)[4:].view(4, 2).T for rank in MESH.devices}
    found = ROWS_TO_COLUMNS.run(held)
    assert found[7].tolist() == [[4.0, 6.0], [5.0, 7.0], [4.0, 6.0], [5.0, 7.0]]
    nothing = plan_of("x, -", "-, x", (0, 4))
    assert nothing.run({rank: freed(0, 4) for rank in MESH.devices})[0].shape == (0, 2)


def test_a_transform_of_torch_cannot_see_through_a_run() -> None:
    """Its gradient would be zero, without an error."""

    def first(rows_of_all: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ROWS_TO_COLUMNS.run(dict.fromkeys(MESH.devices, rows_of_all))[0]
        return found.sum()

    with pytest.raises(ShardError, match="the array of rank 0 is a Tensor whose memory cannot be"):
        torch.func.grad(first)(torch.ones((2, 4)))
