"""Hypothesis strategies for meshes, cut rules, shardings and layouts of every kind.

Values are small, with dimensions of 0 to 9 indices and meshes of at most 12 devices, so that
`oracle` can check them element by element, and failing examples are readable.

>>> import warnings
>>> warnings.simplefilter("ignore")
>>> from hypothesis import given, settings
>>> @settings(max_examples=5, database=None)
... @given(specs_with_shapes())
... def every_spec_can_be_read_back(pair):
...     spec, shape = pair
...     assert reshard.spec(spec.mesh, str(spec)) is spec
>>> import reshard
>>> every_spec_can_be_read_back()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from hypothesis import strategies as st

from oracle import (
    Contents,
    contents_of_boxes,
    contents_of_flat_ranges,
    contents_of_spec,
    contents_of_whole,
)
from reshard.cut_rules import (
    Balanced,
    BlockCyclic,
    Blocks,
    Ceil,
    CutRule,
    Grouped,
    Halo,
    Heads,
    Joined,
    Padded,
    Pieces,
    Sizes,
    Strided,
    WholeBlocks,
    Windows,
    Zigzag,
)
from reshard.layout import REDUCTIONS, Box, Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec

Shape = tuple[int, ...]

MAX_ELEMENTS = 600
AXIS_NAMES = ("x", "y", "z")


@st.composite
def shapes(
    draw: st.DrawFn,
    min_rank: int = 0,
    max_rank: int = 5,
    max_size: int = 9,
    max_elements: int = MAX_ELEMENTS,
) -> Shape:
    """Generate shapes of `min_rank` to `max_rank` dimensions, of 0 to `max_size` indices each."""
    # Hypothesis shrinks towards the first item: matrices, then vectors and cubes.
    ranks = sorted(range(min_rank, max_rank + 1), key=lambda rank: abs(rank - 2))
    rank = draw(st.sampled_from(ranks))
    largest = min(max_size, round(max_elements ** (1 / max(rank, 1))))
    # An empty tensor is worth few examples: nothing of it can go wrong twice.
    size = st.sampled_from([*range(1, largest + 1), *range(1, largest + 1), 0])
    return tuple(draw(size) for _ in range(rank))


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 12, max_axes: int = 3) -> DeviceMesh:
    """Generate meshes whose devices are ranks in any order, with gaps between them."""
    sizes: list[int] = []
    counts = [count for count in (2, 1, 3, 2, 3, 0) if count <= max_axes]
    for _ in range(draw(st.sampled_from(counts))):
        room = max_devices // math.prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in (2, 3, 4, 1, 6, 8) if n <= room])))
    size = math.prod(sizes)
    devices = None
    if draw(st.booleans()):
        ranks = st.integers(0, size + 2)
        devices = draw(st.lists(ranks, min_size=size, max_size=size, unique=True))
    return DeviceMesh("mesh", sizes, AXIS_NAMES[: len(sizes)], devices)


@st.composite
def sizes_adding_up_to(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    """Generate `count` sizes of 0 or more that add up to `total`."""
    # Edges drawn freely: empty parts are as likely as any other size.
    edges = sorted(draw(st.integers(0, total)) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, total], strict=True))


@st.composite
def windows(draw: st.DrawFn, length: int, parts: int) -> Windows:
    """Generate an interval per part, which overlap and together cover `length`."""
    cut = draw(sizes_adding_up_to(length, parts))
    intervals, start = [], 0
    for size in cut:
        before = draw(st.integers(0, min(2, start)))
        after = draw(st.integers(0, min(2, length - start - size)))
        intervals.append((start - before, start + size + after))
        start += size
    order = draw(st.permutations(intervals))
    return Windows(tuple(order))


@st.composite
def rules(draw: st.DrawFn, lengths: Collection[int], parts: int) -> CutRule:
    """Cut rules that can cut each of `lengths` into `parts`.

    Several lengths arise below another level. Rules with numbers of their own (sizes,
    windows, blocks) are given only where there is one length for them to add up to.
    """
    # Functions that make strategies: Hypothesis checks each strategy that is made, drawn or not.
    small = st.integers(1, 4)
    heads = [n for n in range(1, 7) if all(length % n == 0 for length in lengths)]
    whole: list[Callable[[], st.SearchStrategy[CutRule]]] = [
        lambda: st.builds(Ceil, small),
        lambda: st.just(Balanced()),
        lambda: st.sampled_from(heads).map(Heads),
    ]
    other: list[Callable[[], st.SearchStrategy[CutRule]]] = [
        lambda: st.builds(Strided, small),
        lambda: st.builds(BlockCyclic, small, st.integers(0, parts - 1)),
        lambda: st.builds(Padded, small),
        lambda: st.just(Zigzag()),
    ]
    if len(set(lengths)) == 1:
        (length,) = set(lengths)
        sizes = [size for size in (1, 2, 3) if length % size == 0]

        def pieces() -> st.SearchStrategy[tuple[int, ...]]:
            return st.integers(1, 5).flatmap(lambda count: sizes_adding_up_to(length, count))

        whole += [
            lambda: sizes_adding_up_to(length, parts).map(Sizes),
            lambda: windows(length, parts),
            lambda: st.builds(WholeBlocks, pieces()),
            lambda: whole_blocks_with_counts(length, parts),
        ]
        other += [
            lambda: st.builds(Blocks, pieces(), st.sampled_from([Ceil(), Balanced(), Padded(2)])),
            lambda: joined_blocks(length),
            lambda: st.builds(
                Grouped,
                st.sampled_from(sizes),
                st.sampled_from([Ceil(2), Balanced(), Padded(2), BlockCyclic(1)]),
            ),
            lambda: pieces_of_blocks(length, parts),
            lambda: strided_with_local_lengths(length, parts),
        ]
    widths = st.integers(0, 2)

    def halo() -> st.SearchStrategy[CutRule]:
        inside = draw(st.sampled_from(whole))()
        return st.builds(Halo, widths, widths, st.booleans(), st.booleans(), inside)

    found: CutRule = draw(draw(st.sampled_from([*whole, *other, halo]))())
    return found


@st.composite
def whole_blocks_with_counts(draw: st.DrawFn, length: int, parts: int) -> WholeBlocks:
    """Generate whole blocks, a given number of them for each part."""
    blocks = draw(st.integers(1, 6))
    counts = draw(sizes_adding_up_to(blocks, parts))
    return WholeBlocks(draw(sizes_adding_up_to(length, blocks)), counts)


@st.composite
def joined_blocks(draw: st.DrawFn, length: int) -> Joined:
    """Generate blocks, each with its own rule, including shared heads."""
    sizes = draw(st.integers(1, 4).flatmap(lambda count: sizes_adding_up_to(length, count)))
    blocks: list[CutRule] = []
    for size in sizes:
        heads = [Heads(n) for n in range(1, 7) if size % n == 0]
        blocks.append(draw(st.sampled_from([Ceil(), Balanced(), Strided(2), Padded(2), *heads])))
    return Joined(sizes, tuple(blocks))


@st.composite
def pieces_of_blocks(draw: st.DrawFn, length: int, parts: int) -> Pieces:
    """Generate blocks with a piece of any size for each part."""
    blocks = draw(st.integers(1, 4))
    sizes = draw(sizes_adding_up_to(length, blocks * parts))
    return Pieces(tuple(sizes[b * parts : (b + 1) * parts] for b in range(blocks)))


@st.composite
def strided_with_local_lengths(draw: st.DrawFn, length: int, parts: int) -> Strided:
    """Generate a stride with its local lengths."""
    stride = draw(st.integers(1, 4))
    return Strided(stride, tuple(Strided(stride).table(length, parts).local_lengths.tolist()))


@st.composite
def axis_parts(draw: st.DrawFn, mesh: DeviceMesh) -> list[Axis]:
    """Generate the axes of a mesh, some of them in parts, in any order, that together
    are the mesh.
    """
    parts: list[Axis] = []
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size == 1 or not draw(st.booleans()):
            parts.append(Axis(name))
            continue
        pre = 1
        while pre < size:
            rest = size // pre
            part = draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0]))
            parts.append(Axis(name, pre, part))
            pre *= part
    return draw(st.permutations(parts))


@st.composite
def dim_specs(draw: st.DrawFn, mesh: DeviceMesh, axes: Sequence[Axis], length: int) -> DimSpec:
    """Generate the sharding of a dimension of `length` over `axes`, in one or several levels."""
    levels: list[Level] = []
    rest = list(axes)
    while rest:
        count = draw(st.integers(1, len(rest)))
        chosen, rest = rest[:count], rest[count:]
        # A level splits the parts of the levels above, which may have several lengths.
        lengths = DimSpec(levels).table(mesh, length).local_lengths.tolist() if levels else [length]
        parts = math.prod(mesh.axis_size(axis) for axis in chosen)
        levels.append(Level(chosen, draw(rules(lengths, parts))))
    return DimSpec(levels, draw(st.booleans()), draw(st.sampled_from((0, 0, 1, 12))))


@st.composite
def specs(
    draw: st.DrawFn,
    mesh: DeviceMesh,
    shape: Shape,
    reductions: Sequence[str] = REDUCTIONS,
) -> ShardingSpec:
    """Generate shardings of tensors of `shape`.

    They have levels, rules, sub-axes, replicated and partial axes, and restrictions. Without
    `reductions` none is partial.
    """
    uses: dict[object, list[Axis]] = {}
    reduction = draw(st.sampled_from(reductions)) if reductions else "sum"
    dims = range(len(shape))
    # Each dimension twice: most axes should cut something.
    places = [*dims, *dims, "replicated", "unused"]
    if len(reductions) > 0 and draw(st.booleans()):
        places += ["partial"] * (len(shape) + 1)
    for axis in draw(axis_parts(mesh)):
        uses.setdefault(draw(st.sampled_from(places)), []).append(axis)
    used = {axis.name for place, axes in uses.items() if place != "unused" for axis in axes}
    only = {}
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if name not in used and draw(st.booleans()):
            only[name] = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return ShardingSpec(
        mesh,
        [draw(dim_specs(mesh, uses.get(d, []), size)) for d, size in enumerate(shape)],
        uses.get("replicated", ()),
        uses.get("partial", ()),
        reduction,
        only,
    )


@st.composite
def specs_with_shapes(
    draw: st.DrawFn, reductions: Sequence[str] = REDUCTIONS
) -> tuple[ShardingSpec, Shape]:
    """Generate a sharding over some mesh, and a shape that it can lay out."""
    shape = draw(shapes())
    return draw(specs(draw(meshes()), shape, reductions)), shape


@st.composite
def partitions_into_boxes(draw: st.DrawFn, shape: Shape, cuts: int = 4) -> list[Box]:
    """Generate disjoint boxes that together are the tensor, by repeated splits."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, cuts)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[d], box.stop[d]))
        stop = (*box.stop[:d], at, *box.stop[d + 1 :])
        start = (*box.start[:d], at, *box.start[d + 1 :])
        boxes += [Box(box.start, stop), Box(start, box.stop)]
    return draw(st.permutations(boxes))


LayoutAndContents = tuple[Layout, Contents]
LAYOUT_KINDS = ("whole", "flat ranges", "boxes", "overlapping")


@st.composite
def sharded_layouts(
    draw: st.DrawFn, shape: Shape, reductions: Sequence[str] = REDUCTIONS
) -> LayoutAndContents:
    """Generate layouts of shardings."""
    spec = draw(specs(draw(meshes()), shape, reductions))
    return spec.layout(shape), contents_of_spec(spec, shape)


@st.composite
def whole_layouts(draw: st.DrawFn, shape: Shape) -> LayoutAndContents:
    """Generate the whole tensor on a few slots, as with ZeRO's owners or pipeline stages."""
    slots = draw(st.integers(1, 9))
    holders = draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=3, unique=True))
    return Layout.whole(shape, holders, slots), contents_of_whole(shape, holders)


@st.composite
def flat_range_layouts(draw: st.DrawFn, shape: Shape) -> LayoutAndContents:
    """Generate ranges of the flattened tensor, as with ZeRO, FSDP1 and ragged shards."""
    dims = draw(st.integers(0, len(shape)))
    count = draw(st.integers(1, 6))
    cut = draw(sizes_adding_up_to(math.prod(shape[:dims]), count))
    slots = draw(st.permutations(range(count + 2)))
    ranges, start = {}, 0
    for slot, size in zip(slots, cut, strict=False):
        ranges[slot] = (start, start + size)
        start += size
    layout = Layout.flat_ranges(shape, ranges, dims, count + 2)
    local = {slot: layout.local_shape(slot) or () for slot in layout.holders}
    held = {slot: ranges[slot] for slot in layout.holders}
    return layout, contents_of_flat_ranges(shape, held, dims, local)


@st.composite
def box_layouts(draw: st.DrawFn, shape: Shape) -> LayoutAndContents:
    """Generate boxes that form no grid, several on a slot, some on two slots."""
    pairs: list[tuple[int, Box]] = []
    for box in draw(partitions_into_boxes(shape)):
        holders = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True))
        pairs += [(slot, box) for slot in holders]
    return Layout.from_boxes(shape, pairs, 6), contents_of_boxes(shape, pairs)


@st.composite
def overlapping_box_layouts(
    draw: st.DrawFn, shape: Shape, max_slots: int | None = None
) -> LayoutAndContents:
    """Generate boxes that overlap their neighbours, one per slot.

    With `max_slots` there are at most as many slots, and boxes on a slot overlap too.
    """
    pairs: list[tuple[int, Box]] = []
    for number, box in enumerate(draw(partitions_into_boxes(shape))):
        before = [draw(st.integers(0, min(2, a))) for a in box.start]
        after = [draw(st.integers(0, min(2, n - b))) for b, n in zip(box.stop, shape, strict=True)]
        start = tuple(a - more for a, more in zip(box.start, before, strict=True))
        stop = tuple(b + more for b, more in zip(box.stop, after, strict=True))
        slot = number if max_slots is None else draw(st.integers(0, max_slots - 1))
        pairs.append((slot, Box(start, stop)))
    return Layout.from_boxes(shape, pairs, max_slots), contents_of_boxes(shape, pairs)


@st.composite
def layouts_with_contents(
    draw: st.DrawFn, shape: Shape, reductions: Sequence[str] = REDUCTIONS, max_slots: int = 0
) -> LayoutAndContents:
    """Generate layouts of every kind, each with the oracle's contents.

    With `max_slots` some have boxes that overlap on a slot, of which there are at most as many.
    """
    kind = draw(st.sampled_from(("sharded",) * 5 + LAYOUT_KINDS + ("repeated",) * (max_slots > 0)))
    found: st.SearchStrategy[LayoutAndContents] = {
        "sharded": lambda: sharded_layouts(shape, reductions),
        "whole": lambda: whole_layouts(shape),
        "flat ranges": lambda: flat_range_layouts(shape),
        "boxes": lambda: box_layouts(shape),
        "overlapping": lambda: overlapping_box_layouts(shape),
        "repeated": lambda: overlapping_box_layouts(shape, max_slots),
    }[kind]()
    return draw(found)


def layouts(shape: Shape, reductions: Sequence[str] = REDUCTIONS) -> st.SearchStrategy[Layout]:
    """Generate layouts of every kind for tensors of `shape`."""
    return layouts_with_contents(shape, reductions).map(lambda pair: pair[0])


@st.composite
def movements(
    draw: st.DrawFn, reductions: Sequence[str] = REDUCTIONS
) -> tuple[LayoutAndContents, LayoutAndContents]:
    """Generate a source and a target for a tensor, each with its contents.

    Only the source may have an element twice on a slot.
    """
    shape = draw(shapes())
    source = draw(layouts_with_contents(shape, reductions, max_slots=2))
    return source, draw(layouts_with_contents(shape, reductions))
