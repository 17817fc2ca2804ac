"""Ragged shards: ranges of flattened dimensions, alone and with other placements."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError, NotationError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.dtensor import Partial, Placement, Replicate, Shard, StridedShard
from reshard.notation.ragged import RaggedShard, parse_ragged, ragged_layout, ragged_text
from reshard.sharding import spec as native

Shape = tuple[int, ...]


def locals_of(layout: Layout) -> dict[int, np.ndarray[Any, Any]]:
    """What every rank holds of a tensor whose elements are numbered, flat."""
    whole = Layout.replicated(layout.shape, layout.slots)
    array = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    held = reshard.plan(whole, layout).run(dict.fromkeys(range(layout.slots), array))
    return {rank: local.ravel() for rank, local in held.items()}


@pytest.mark.parametrize(
    ("shape", "dims", "units", "edges"),
    [
        ((2, 64), (0,), (1, 1, 0, 0), (0, 64, 128, 128, 128)),
        ((2, 64), (0, 1), (1, 1, 0, 0), (0, 64, 128, 128, 128)),
        ((2, 64), (0, 1), (21, 21, 22, 0), (0, 42, 84, 128, 128)),
        ((5, 3, 6, 7), (0, 1), (3, 7, 4, 1), (0, 126, 420, 588, 630)),
        ((5, 3, 6, 7), (0, 1, 2), (43, 23, 7, 17), (0, 301, 462, 511, 630)),
        ((5, 3, 6, 7), (0, 1, 2, 3), (17, 13, 31, 2), (0, 170, 300, 610, 630)),
        ((8, 3), (0,), (1, 2, 1, 0), (0, 6, 18, 24, 24)),
        ((6, 2), (0,), (0, 0, 5, 0), (0, 0, 0, 12, 12)),
        ((0, 3), (0,), (1, 2, 1, 0), (0, 0, 0, 0, 0)),
        ((4, 0), (0,), (1, 2, 1, 0), (0, 0, 0, 0, 0)),
    ],
    ids=str,
)
def test_ranges_by_hand(shape: Shape, dims: Shape, units: Shape, edges: Shape) -> None:
    text = str(RaggedShard(dims, units))
    assert text == f"RaggedShard(dims={dims}, local_units={units})"
    layout = parse_ragged(text, shape=shape)
    for rank, (start, stop) in enumerate(itertools.pairwise(edges)):
        assert locals_of(layout)[rank].tolist() == list(range(start, stop))
    # An empty local tensor has the trailing dimensions all the same.
    for rank in (rank for rank, unit in enumerate(units) if not unit):
        assert layout.local_shape(rank) == (0,) * len(dims) + shape[len(dims) :]
    width = math.prod(shape[len(dims) :])
    if width:
        ranges = {r: (a // width, b // width) for r, (a, b) in enumerate(itertools.pairwise(edges))}
        assert layout is Layout.flat_ranges(shape, ranges, len(dims))
    assert parse_ragged(ragged_text(layout), shape=shape) is layout


def test_the_text_takes_the_fewest_dimensions_and_the_smallest_units() -> None:
    layout = parse_ragged("RaggedShard((0, 1), (3, 3, 6))", shape=(4, 3, 2))
    assert ragged_text(layout) == "RaggedShard(dims=(0,), local_units=(1, 1, 2))"
    layout = parse_ragged("RaggedShard((0, 1), (1, 1, 10))", shape=(4, 3, 2))
    assert ragged_text(layout) == "RaggedShard(dims=(0, 1), local_units=(1, 1, 10))"


@st.composite
def ragged_cases(draw: st.DrawFn) -> tuple[DeviceMesh, Shape, list[Placement | RaggedShard], int]:
    """A mesh in any order, a shape, and placements with a ragged one among them."""
    mesh_shape = draw(st.sampled_from([(2,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (1, 4)]))
    size = math.prod(mesh_shape)
    mesh = DeviceMesh("mesh", mesh_shape, ("a", "b", "c")[: len(mesh_shape)])
    devices = draw(st.permutations(range(size)))
    mesh = DeviceMesh("mesh", mesh_shape, mesh.axis_names, devices)
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    dims = draw(st.integers(1, len(shape)))
    at = draw(st.integers(0, len(mesh_shape) - 1))
    units = draw(
        st.lists(st.integers(0, 3), min_size=mesh_shape[at], max_size=mesh_shape[at]).filter(any)
    )
    dim = st.integers(0, len(shape) - 1)
    others = st.one_of(
        dim.map(Shard), st.builds(StridedShard, dim, st.integers(1, 3)), st.just(Replicate())
    )
    behind: list[Placement | RaggedShard] = [draw(others) for _ in mesh_shape[at + 1 :]]
    before: list[Placement | RaggedShard] = [Replicate()] * at
    ragged = RaggedShard(tuple(range(dims)), tuple(units))
    return mesh, shape, [*before, ragged, *behind], at


def chunks(indices: list[int], parts: int) -> list[list[int]]:
    size = max(-(-len(indices) // parts), 1)
    return [indices[i * size : (i + 1) * size] for i in range(parts)]


def share(placement: object, indices: list[int], parts: int, coordinate: int) -> list[int]:
    """What one coordinate gets of the indices of a dimension, as DTensor cuts them."""
    if isinstance(placement, StridedShard):
        blocks = chunks(indices, placement.split_factor)
        return [i for block in blocks for i in chunks(block, parts)[coordinate]]
    return chunks(indices, parts)[coordinate]


@given(ragged_cases())
def test_others_cut_first_and_the_rest_is_flattened(
    case: tuple[DeviceMesh, Shape, list[Placement | RaggedShard], int],
) -> None:
    mesh, shape, values, at = case
    ragged = values[at]
    assert isinstance(ragged, RaggedShard)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    expected: dict[int, list[int]] = {}
    whole = True
    coordinates = itertools.product(*map(range, mesh.shape))
    for rank, here in zip(mesh.devices, coordinates, strict=True):
        indices = [list(range(length)) for length in shape]
        for value, parts, coordinate in zip(values, mesh.shape, here, strict=True):
            if isinstance(value, Shard | StridedShard):
                indices[value.dim] = share(value, indices[value.dim], parts, coordinate)
        local = numbers[np.ix_(*indices)]
        rows = local.reshape(math.prod(local.shape[: len(ragged.dims)]), -1) if local.size else None
        length = math.prod(local.shape[: len(ragged.dims)])
        before = sum(ragged.local_units[: here[at]]) * length
        behind = sum(ragged.local_units[: here[at] + 1]) * length
        units = sum(ragged.local_units)
        whole = whole and not behind % units and not before % units
        if whole:
            window = slice(before // units, behind // units)
            expected[rank] = [] if rows is None else rows[window].ravel().tolist()
    event("whole" if whole else "inside an index")
    if not whole:
        with pytest.raises(NotationError, match="would end inside an index"):
            ragged_layout(mesh, values, shape)
        return
    layout = ragged_layout(mesh, values, shape)
    text = f"[{', '.join(map(str, values))}]"
    assert parse_ragged(text, mesh, shape) is layout
    assert {rank: local.tolist() for rank, local in locals_of(layout).items()} == expected


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_any_ranges_one_after_the_other_have_a_text(shape: list[int], lengths: list[int]) -> None:
    total = math.prod(shape)
    assume(total)
    lengths = [*lengths, max(total - sum(lengths), 0)]
    stops = [min(stop, total) for stop in itertools.accumulate(lengths, initial=0)]
    ranges = dict(enumerate(itertools.pairwise(stops)))
    layout = Layout.flat_ranges(shape, ranges)
    text = ragged_text(layout)
    assert [local.tolist() for local in locals_of(parse_ragged(text, shape=shape)).values()] == [
        list(range(start, stop)) for start, stop in ranges.values()
    ]


def test_a_range_may_lie_across_the_blocks_of_a_stride() -> None:
    # ep has 0:4 and 8:12, and 4:8 and 12:16; fsdp has a quarter of that, and the rest.
    mesh = DeviceMesh.of(fsdp=2, ep=2)
    values = [RaggedShard((0,), (1, 3)), StridedShard(0, 2)]
    held = locals_of(ragged_layout(mesh, values, (16,)))
    assert [held[rank].tolist() for rank in range(4)] == [
        [0, 1],
        [4, 5],
        [2, 3, 8, 9, 10, 11],
        [6, 7, 12, 13, 14, 15],
    ]


def test_partial_contributions_are_cut_too() -> None:
    mesh = DeviceMesh.of(fsdp=2, tp=2)
    layout = ragged_layout(mesh, [RaggedShard((0, 1), (1, 2)), Partial("sum")], (3, 3))
    assert (layout.contributions, layout.reduction) == (2, "sum")
    assert [layout.cell_contribution[layout.cells_of(rank)[0]] for rank in range(4)] == [0, 1, 0, 1]
    assert [layout.local_shape(rank) for rank in range(4)] == [(1, 3), (1, 3), (2, 3), (2, 3)]


def test_a_ragged_shard_of_vescale_is_taken_as_it_is() -> None:
    foreign = type("RaggedShard", (), {"dims": (0,), "local_units": (1, 3)})()
    mesh = DeviceMesh.of(fsdp=2)
    assert ragged_layout(mesh, [foreign], (4, 2)) is ragged_layout(
        mesh, [RaggedShard((0,), (1, 3))], (4, 2)
    )
    strided = "[_StridedRaggedShard(dims=(0,), local_units=(1, 3), split_factor=2), Shard(0)]"
    two = DeviceMesh.of(fsdp=2, ep=2)
    plain = "[RaggedShard(dims=(0,), local_units=(1, 3)), Shard(0)]"
    assert parse_ragged(strided, two, (8, 2)) is parse_ragged(plain, two, (8, 2))
    assert locals_of(parse_ragged(plain, two, (8,)))[2].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RaggedShard((1,), (1, 1))", r"flattens dimensions \(1,\); give leading dimensions"),
        ("RaggedShard((0, 2), (1, 1))", "give leading dimensions"),
        ("RaggedShard((), (1, 1))", "give leading dimensions"),
        ("RaggedShard((0,), (0, 0))", "must not be negative or all 0"),
        ("RaggedShard((0,), (2, -1))", "must not be negative or all 0"),
        ("RaggedShard((0,), ())", "must not be negative or all 0"),
        ("RaggedShard(0, (1, 1))", "needs dims and local_units"),
        ("RaggedShard((0,))", "needs dims and local_units.*got .* and None"),
        ("RaggedShard((0, 1, 2), (1, 1))", "flattens 3 dimensions of a tensor of 2"),
        (
            "RaggedShard((0,), (1, 1, 1))",
            "divides 4 indices into 3 units, and rank 0 would end",
        ),
        ("[RaggedShard((0,), (1, 1)), Shard(0)]", "tensor's mesh; give a mesh"),
        ("Shard(0)", "tensor's mesh; give a mesh"),
        ("Bogus(0)", r"cannot read 'Bogus\(0\)'"),
    ],
)
def test_invalid_texts_are_refused_with_the_text(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message) as caught:
        parse_ragged(text, shape=(4, 6))
    assert f"`{text}`" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Shard(0), RaggedShard((0,), (1, 1))]", r"Shard\(0\) precedes RaggedShard"),
        ("[RaggedShard((0,), (1, 1))]", "1 placements for a mesh of 2 axes"),
        ("[Shard(0), Shard(0)]", "0 ragged shards"),
        ("[RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 1))]", "2 ragged shards"),
        ("[RaggedShard((0,), (1, 1, 2)), R]", "units for 3 ranks, but axis a has 2"),
    ],
)
def test_texts_must_fit_the_mesh(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_ragged(text, DeviceMesh.of(a=2, b=2), (4, 6))


def test_layouts_that_a_ragged_shard_cannot_express() -> None:
    mesh = DeviceMesh.of(x=2)
    for layout in (
        native(mesh, "-, x").layout((4, 4)),
        Layout.replicated((4, 4), 2),
        Layout.flat_ranges((4, 4), {0: (6, 16), 1: (0, 6)}),
        Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 10)}),
        Layout.flat_ranges((4, 4), {0: (0, 6), 2: (6, 16)}),
        native(mesh, "- | sum(x)").layout((4,)),
        Layout.replicated((), 1),
    ):
        with pytest.raises(NotationError, match="a ragged shard cannot express <Layout"):
            ragged_text(layout)
    with pytest.raises(NotationError, match="cannot express the sharding `x`"):
        ragged_text(native(mesh, "x"))
    assert ragged_text(native(mesh, "x").layout((4,))).endswith("local_units=(1, 1))")
    with pytest.raises(NotationError, match="tensor's shape; give a shape"):
        parse_ragged("RaggedShard((0,), (1, 1))", mesh)


@given(st.text(alphabet="RaggedSh(),01 [S]units=local_", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for candidate in (text, f"RaggedShard({text})"):
        try:
            layout = parse_ragged(candidate, DeviceMesh.of(x=2), (4, 6))
        except LayoutError:
            continue
        assert layout.shape == (4, 6)
