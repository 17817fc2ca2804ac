"""Tensors of other elements than their source, against numbers by hand and one block at a time."""

from __future__ import annotations

from typing import Any

import pytest

import reshard
from reshard.errors import ShardError
from reshard.layout import Layout

torch = pytest.importorskip("torch")

from reshard.torch import BlockQuantized, Cast, Transform  # noqa: E402


def quantised(received: Any, block: tuple[int, int], scales: tuple[int, ...]) -> tuple[Any, Any]:
    values = torch.zeros(received.shape).to(torch.float8_e4m3fn)
    target = {"w": values, "w_scale_inv": torch.zeros(scales)}
    BlockQuantized(block).finish_receive("w", received, target)
    return values.float(), target["w_scale_inv"]


def test_a_block_by_hand() -> None:
    # The greatest float8_e4m3fn is 448.
    received = torch.tensor([[448.0, -224.0, 2.0], [0.0, 56.0, -896.0], [0.0, 0.0, 3.5]])
    values, scales = quantised(received, (2, 2), (2, 2))
    assert scales.tolist() == [[1.0, 2.0], [1.0, 3.5 / 448]]
    assert values.tolist() == [[448.0, -224.0, 1.0], [0.0, 56.0, -448.0], [0.0, 0.0, 448.0]]
    assert received[0, 0] == 448 and received[2, 2] == 3.5, "what has arrived was changed"


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 5), (3, 130, 129), (0, 4)])
def test_each_block_by_itself(shape: tuple[int, ...]) -> None:
    received = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = tuple(-(-n // 128) for n in shape[-2:])
    values, scales = quantised(received, (128, 128), (*shape[:-2], *counts))
    for i in range(counts[0]):
        for j in range(counts[1]):
            at = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = received[at].float()
            scale = block.abs().flatten(-2).max(dim=-1).values / 448
            assert torch.equal(scales[..., i, j], scale)
            expected = (block / scale[..., None, None]).to(torch.float8_e4m3fn).float()
            assert torch.equal(values[at], expected)


def check(layout: Layout, rank: int, values: Any, scales: Any, block: tuple[int, int]) -> None:
    target = {"w": values, "w_scale_inv": scales}
    BlockQuantized(block).check(
        "w", layout, rank, {n: t for n, t in target.items() if t is not None}
    )


FLOAT8 = torch.zeros(3, 4).to(torch.float8_e5m2)
ROWS = reshard.spec(reshard.DeviceMesh.of(tp=2), "tp, -").layout((5, 4))


def test_blocks_that_ranks_share_are_refused() -> None:
    check(ROWS, 0, FLOAT8, torch.zeros(1, 1), (3, 4))
    check(ROWS, 1, FLOAT8[:2], torch.zeros(1, 2), (3, 2))
    for values, scales, block, told in (
        (FLOAT8, torch.zeros(2, 1), (2, 4), "has 0:3 of dimension 0, which cuts a block of 2"),
        (FLOAT8, torch.zeros(1, 2), (3, 4), r"scales torch.float32 \[1, 2\]"),
        (FLOAT8, torch.zeros(1, 1, dtype=torch.int32), (3, 4), "scales torch.int32"),
        (FLOAT8, None, (3, 4), "this rank has no 'w_scale_inv'"),
        (torch.zeros(3, 4), torch.zeros(1, 1), (3, 4), "torch.float32 of shape"),
    ):
        with pytest.raises(ShardError, match=told):
            check(ROWS, 0, values, scales, block)


def test_the_base_copies() -> None:
    received, target = torch.arange(3), {"w": torch.zeros(3)}
    Transform().finish_receive("w", received, target)
    assert target["w"].tolist() == [0, 1, 2]
    assert (Transform().outputs("w"), Transform().sent_dtype("int8")) == (("w",), "int8")
    assert Cast("BF16").sent_dtype("float32") == "bfloat16"
    assert repr(type("Other", (Transform,), {})()) == "Other"
