"""Flat buffers of ZeRO and FSDP: every rank's part of every tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import NotationError
from reshard.layout import Layout
from reshard.notation.flat_buffer import BufferPiece, FlatBuffer

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def held_by(layout: Layout) -> dict[int, list[int]]:
    whole = Layout.replicated(layout.shape, layout.slots)
    array = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    held = reshard.plan(whole, layout).run(dict.fromkeys(range(layout.slots), array))
    return {slot: local.ravel().tolist() for slot, local in held.items()}


@given(st.lists(shapes, max_size=5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_parts_are_those_of_the_buffer_written_out(
    given_shapes: list[Shape], ranks: int, alignment: int, multiple: int
) -> None:
    tensors = {f"t{i}": shape for i, shape in enumerate(given_shapes)}
    buffer = FlatBuffer(tensors, ranks, alignment, multiple)
    written: list[tuple[str, int] | None] = []
    for name, shape in tensors.items():
        written += [None] * (-len(written) % alignment)
        written += [(name, element) for element in range(math.prod(shape))]
    while len(written) % (ranks * multiple):
        written.append(None)
    assert buffer.elements == len(written)
    each = len(written) // ranks
    assert buffer.rank_elements == each
    expected: dict[str, dict[int, list[int]]] = {name: {} for name in tensors}
    for rank in range(ranks):
        part = written[rank * each : (rank + 1) * each]
        again: list[tuple[str, int] | None] = [None] * each
        for name, start, stop, offset in buffer.pieces(rank):
            again[offset : offset + stop - start] = [(name, i) for i in range(start, stop)]
        assert again == part
        for item in part:
            if item is not None:
                expected[item[0]].setdefault(rank, []).append(item[1])
    layouts = buffer.layouts()
    assert {name: held_by(layout) for name, layout in layouts.items()} == expected
    assert all(buffer.layout(name) is layout for name, layout in layouts.items())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("with_original_parameters", [False, True])
def test_fsdp_of_pytorch(ranks: int, with_original_parameters: bool) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

    from checkpoint.torch_checkpoints import standing_for

    for rank in range(ranks):
        with standing_for(rank, ranks):
            module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
            tensors = {name: tuple(p.shape) for name, p in module.named_parameters()}
            handle: Any = FlatParamHandle(
                list(module.parameters()),
                module,
                torch.device("cpu"),
                HandleShardingStrategy.FULL_SHARD,
                False,
                None,
                None,
                False,
                torch.distributed.group.WORLD,
                with_original_parameters,
            )
            handle.shard()
            # 16 bytes are four float32.
            buffer = FlatBuffer(tensors, ranks, alignment=4 if with_original_parameters else 1)
            assert tuple(handle.flat_param.shape) == (buffer.rank_elements,)
            assert handle.flat_param._fqns == tuple(tensors) or handle.flat_param._fqns == list(
                tensors
            )
            expected = [
                BufferPiece(
                    name,
                    info.intra_param_start_idx,
                    info.intra_param_end_idx + 1,
                    info.offset_in_shard,
                )
                for name, info in zip(tensors, handle.flat_param._shard_param_infos, strict=True)
                if info.in_shard
            ]
            assert list(buffer.pieces(rank)) == expected


def test_zero_of_deepspeed_by_hand() -> None:
    # Linear(16, 24) and Linear(24, 7) over 2 ranks, padded to a multiple of 2 x 2: 583 to 584.
    tensors = {"0.weight": (24, 16), "0.bias": (24,), "1.weight": (7, 24), "1.bias": (7,)}
    buffer = FlatBuffer(tensors, ranks=2, rank_multiple=2)
    assert (buffer.elements, buffer.rank_elements) == (584, 292)
    assert buffer.starts == (0, 384, 408, 576)
    assert buffer.pieces(0) == (BufferPiece("0.weight", 0, 292, 0),)
    assert buffer.pieces(1) == (
        BufferPiece("0.weight", 292, 384, 0),
        BufferPiece("0.bias", 0, 24, 92),
        BufferPiece("1.weight", 0, 168, 116),
        BufferPiece("1.bias", 0, 7, 284),
    )
    assert buffer.layout("1.bias").holders == (1,)
    # Stage 3 has a buffer for each tensor.
    alone = FlatBuffer({"1.bias": (7,)}, ranks=2)
    assert (alone.rank_elements, alone.layout("1.bias").local_shape(1)) == (4, (3,))


def test_ranks_of_the_buffer_are_any_devices() -> None:
    buffer = FlatBuffer([("a", (4,))], ranks=2)
    layout = buffer.layout("a", devices=[5, 2])
    assert (layout.slots, layout.holders) == (6, (2, 5))
    assert held_by(layout) == {5: [0, 1], 2: [2, 3]}


def test_a_buffer_is_a_value() -> None:
    one = FlatBuffer({"a": [4]}, 2)
    assert one == FlatBuffer([("a", (4,))], 2)
    assert hash(one) == hash(FlatBuffer([("a", (4,))], 2))
    assert one != FlatBuffer({"a": (4,)}, 2, alignment=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: FlatBuffer([("a", (1,)), ("a", (2,))], 2), "'a' occurs twice in a flat buffer"),
        (lambda: FlatBuffer({"a": (-1,)}, 2), r"'a' in a flat buffer \[-1\] must not be negative"),
        (lambda: FlatBuffer({"a": (1.5,)}, 2), r"'a' in a flat buffer \[1\.5\] must be a list"),  # type: ignore
        (lambda: FlatBuffer({"a": (1,)}, 2.7), r"a flat buffer's ranks 2\.7 must be a whole"),  # type: ignore
        (lambda: FlatBuffer({"a": (1,)}, 0), "a flat buffer's ranks 0 must be at least 1"),
        (lambda: FlatBuffer({"a": (1,)}, 1, alignment=0), "alignment 0 must be at least 1"),
        (
            lambda: FlatBuffer({"a": (1,)}, 1, rank_multiple=-1),
            "rank_multiple -1 must be at least 1",
        ),
        (lambda: FlatBuffer({"a": (1,)}, 2).pieces(2), "rank 2 of a flat buffer over 2 ranks"),
        (lambda: FlatBuffer({"a": (1,)}, 2).layout("b"), "'b' is not in the flat buffer"),
        (lambda: FlatBuffer({}, 2).layout("b"), "which has no tensors"),
        (
            lambda: FlatBuffer({"a": (1,)}, 2).layouts([0]),
            r"devices \[0\] .* give a device",
        ),
        (lambda: FlatBuffer({"a": (1,)}, 2).layouts([1, 1]), r"devices \[1, 1\]"),
    ],
)
def test_invalid_flat_buffers_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        wrong()
