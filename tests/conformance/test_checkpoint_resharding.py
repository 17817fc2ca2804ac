"""A checkpoint of N ranks on M, by both strategies of the resharding notes, N and M in 1 to 9.

The intent of the notes: names are unique global tensors, slices have full rank, the targets of
a tensor are those that receive something of it, and a scalar is written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

import reshard
from conformance.checked_movement import Row, Side, check, rows
from oracle import contents_of_boxes, contents_of_whole
from reshard.dtypes import dtype
from reshard.recipes.strategies import Tensors, strategy

MODEL: Tensors = {
    "embedding": (dtype("bfloat16"), (13, 3)),
    "norm": (dtype("float32"), (4,)),
    "step": (dtype("int64"), ()),
    "weight": (dtype("bfloat16"), (9, 2, 2)),
    "bias": (dtype("bfloat16"), (9,)),
    "one": (dtype("float32"), (1, 5)),
    "scale": (dtype("float32"), ()),
    "none": (dtype("float32"), (0, 3)),
}
SIZES = range(1, 10)


def chunks(length: int, ranks: int) -> list[tuple[int, int]]:
    """The rows of each rank by the notes: as many as the length over the ranks, rounded up."""
    size = math.ceil(length / ranks)
    return [(min(rank * size, length), min(rank * size + size, length)) for rank in range(ranks)]


def slices(shape: tuple[int, ...], sources: int, targets: int) -> set[Row]:
    """The slices of the parallel strategy by the notes' own loop, with every dimension said."""
    if not shape:
        return {(0, 0, (), (), ())}
    if 0 in shape:
        return set()
    rest = shape[1:]
    zeros = (0,) * len(rest)
    found = set()
    for source, (source_start, source_end) in enumerate(chunks(shape[0], sources)):
        for target, (target_start, target_end) in enumerate(chunks(shape[0], targets)):
            start, end = max(source_start, target_start), min(source_end, target_end)
            if start < end:
                at, to = start - source_start, start - target_start
                found.add((source, target, (at, *zeros), (to, *zeros), (end - start, *rest)))
    return found


def by_simple(tensors: Tensors, ranks: int) -> dict[str, Side]:
    """Whole tensors, dealt in turn: what the strategy says, and what each rank should hold."""
    layouts = strategy("simple")(tensors, ranks)
    return {
        name: Side(layouts[name], contents_of_whole(shape, [number % ranks]))
        for number, (name, (_, shape)) in enumerate(tensors.items())
    }


def by_parallel(tensors: Tensors, ranks: int) -> dict[str, Side]:
    """Rows cut by ceil: what the strategy says, and what each rank should hold."""
    layouts = strategy("parallel")(tensors, ranks)
    sides = {}
    for name, (_, shape) in tensors.items():
        contents = contents_of_whole(shape, [0])
        if math.prod(shape) and shape:
            zeros = (0,) * (len(shape) - 1)
            boxes = [
                (rank, reshard.Box((start, *zeros), (stop, *shape[1:])))
                for rank, (start, stop) in enumerate(chunks(shape[0], ranks))
                if start < stop
            ]
            contents = contents_of_boxes(shape, boxes)
        sides[name] = Side(layouts[name], contents)
    return sides


@pytest.mark.parametrize("sources", SIZES)
@pytest.mark.parametrize("targets", SIZES)
def test_the_parallel_strategy(sources: int, targets: int) -> None:
    before = by_parallel(MODEL, sources)
    after = by_parallel(MODEL, targets)
    for name, (_, shape) in MODEL.items():
        expected = slices(shape, sources, targets)
        moved = sum(math.prod(row[-1]) for row in expected if row[0] != row[1])
        plan = check(before[name], after[name], moved)
        assert rows(plan) == expected
        if expected:
            assert {target for _, target, *_ in expected} == set(plan.target.holders)


@pytest.mark.parametrize("sources", SIZES)
@pytest.mark.parametrize("targets", SIZES)
def test_the_simple_strategy(sources: int, targets: int) -> None:
    before = by_simple(MODEL, sources)
    # The notes deal tensors as they come: shard by shard of the source.
    names = list(MODEL)
    order = [name for rank in range(sources) for name in names[rank::sources]]
    after = by_simple({name: MODEL[name] for name in order}, targets)
    for number, name in enumerate(order):
        shape = MODEL[name][1]
        source, target = names.index(name) % sources, number % targets
        origin = (0,) * len(shape)
        whole = (source, target, origin, origin, shape)
        plan = check(before[name], after[name], 0 if source == target else math.prod(shape))
        assert rows(plan) == ({whole} if math.prod(shape) else set())


@pytest.mark.parametrize("sources", SIZES)
@pytest.mark.parametrize("targets", SIZES)
def test_from_one_strategy_to_the_other(sources: int, targets: int) -> None:
    whole = by_simple(MODEL, sources)
    cut = by_parallel(MODEL, targets)
    for number, (name, (_, shape)) in enumerate(MODEL.items()):
        owner = number % sources
        kept = 0 if owner else math.prod(shape)
        if shape and owner < targets:
            start, stop = chunks(shape[0], targets)[owner]
            kept = (stop - start) * math.prod(shape[1:])
        moved = math.prod(shape) - kept
        check(whole[name], cut[name], moved)
        # Back, what the owner has is the same.
        check(cut[name], whole[name], moved)


@pytest.mark.parametrize("place", [by_simple, by_parallel])
@pytest.mark.parametrize("ranks", SIZES)
def test_every_element_is_written_once(
    place: Callable[[Tensors, int], dict[str, Side]], ranks: int
) -> None:
    for side in place(MODEL, ranks).values():
        layout = side.layout
        held = [box.elements for slot in layout.holders for box in layout.boxes(slot)]
        assert sum(held) == math.prod(layout.shape)
        assert not side.contents.missing()
