"""Differences of layouts: by elements that ranks hold, whatever their order and padding."""

from __future__ import annotations

from reshard import DeviceMesh, spec
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts.layout_differences import list_differences

MESH = DeviceMesh.of(tp=2)


def differ(one: Layout, other: Layout) -> bool:
    return bool(list_differences({"w": one}, {"w": other}))


def test_the_order_in_memory_and_padding_make_no_difference() -> None:
    halves = Layout.from_boxes((4,), [(0, Box((2,), (4,))), (0, Box((0,), (2,)))], 1)
    assert not differ(halves, Layout.replicated((4,), 1))
    padded = spec(MESH, "tp@pad4").layout((6,))
    assert not differ(padded, Layout.from_boxes((6,), [(0, Box((0,), (4,))), (1, Box((4,), (6,)))]))
    blocks = Layout.from_boxes((2, 2), [(0, Box((0, 0), (1, 2))), (0, Box((1, 0), (2, 2)))], 1)
    columns = Layout.from_boxes((2, 2), [(0, Box((0, 0), (2, 1))), (0, Box((0, 1), (2, 2)))], 1)
    assert not differ(blocks, columns)


def test_a_corner_that_is_missing_is_a_difference() -> None:
    corner = [(0, Box((0, 0), (1, 2))), (0, Box((1, 0), (2, 1)))]
    assert differ(Layout.from_boxes((2, 2), corner, 1), Layout.replicated((2, 2), 1))
    other = [(0, Box((0, 0), (2, 1))), (0, Box((0, 1), (1, 2)))]
    same = (Layout.from_boxes((2, 2), boxes, 1) for boxes in (corner, other))
    assert not differ(*same)


def test_differences_are_by_pattern_and_name_a_rank() -> None:
    whole, cut = (spec(MESH, text).layout((4, 6)) for text in ("-, -", "-, tp"))
    ours = {f"layers.{i}.w": whole for i in range(5)} | {"norm": whole, "mine": whole}
    theirs = {name: cut if name.startswith("layers") else whole for name in ours if name != "mine"}
    (found,) = list_differences(ours, theirs)
    assert found.pattern == "layers.*.w"
    assert len(found.names) == 5
    assert found.ranks == (0, 1)
    assert (found.ours, found.theirs) == ("all of it", "[0:4, 0:3]")
    nothing = Layout.whole((4, 6), [0], 2)
    (found,) = list_differences({"norm": nothing}, {"norm": whole})
    assert (found.rank, found.ours, found.theirs) == (1, "nothing", "all of it")


def test_scalars_and_empty_tensors() -> None:
    for shape in ((), (0, 4)):
        assert not differ(Layout.replicated(shape, 2), Layout.replicated(shape, 2))
    assert differ(Layout.whole((), [0], 2), Layout.replicated((), 2))
    assert not differ(Layout.whole((0,), [0], 2), Layout.replicated((0,), 2))
