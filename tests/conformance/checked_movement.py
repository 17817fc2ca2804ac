"""One movement, checked in every way that the cases of this folder ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import reshard
from oracle import (
    Contents,
    contents_of_boxes,
    contents_of_flat_ranges,
    contents_of_spec,
    contents_of_whole,
    least_moved,
    shards_of,
)

# Beyond this many elements, sets of them take too long; the expected count is then by hand alone.
MOST_COUNTED = 5_000


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a movement: a layout, and what the oracle says that it holds."""

    layout: reshard.Layout
    contents: Contents

    @classmethod
    def sharded(cls, mesh: reshard.DeviceMesh, text: str, shape: Sequence[int]) -> Side:
        """A sharding in native text."""
        spec = reshard.spec(mesh, text)
        return cls(spec.layout(shape), contents_of_spec(spec, shape))

    @classmethod
    def whole(cls, shape: Sequence[int], holders: Iterable[int], slots: int) -> Side:
        """The whole tensor on some of `slots` slots."""
        held = list(holders)
        return cls(reshard.Layout.whole(shape, held, slots), contents_of_whole(shape, held))

    @classmethod
    def boxes(cls, shape: Sequence[int], pairs: Iterable[tuple[int, reshard.Box]]) -> Side:
        """Boxes on slots."""
        listed = list(pairs)
        return cls(reshard.Layout.from_boxes(shape, listed), contents_of_boxes(shape, listed))

    @classmethod
    def flat(cls, shape: Sequence[int], ranges: Mapping[int, tuple[int, int]], dims: int) -> Side:
        """Ranges of the flattened leading `dims` dimensions, by slot."""
        layout = reshard.Layout.flat_ranges(shape, ranges, dims)
        local = {slot: layout.local_shape(slot) or () for slot in layout.holders}
        return cls(layout, contents_of_flat_ranges(shape, ranges, dims, local))


def check(source: Side, target: Side, moved: int | None = None) -> reshard.Plan:
    """Plan, verify, count and run; return the plan.

    `moved` is the expected number of elements, where it was worked out by hand.
    """
    plan = check_geometry(source.layout, target.layout, moved)
    shape = source.contents.shape
    if math.prod(shape) <= MOST_COUNTED:
        assert plan.moved_elements == least_moved(source.contents, target.contents)
    dense = np.arange(math.prod(shape), dtype=np.int32).reshape(tuple(shape)) + 1
    result = plan.run(shards_of(source.contents, [dense]))
    assert same(result, shards_of(target.contents, [dense]))
    return plan


def check_geometry(
    source: reshard.Layout, target: reshard.Layout, moved: int | None = None
) -> reshard.Plan:
    """The same without data, for tensors too large to fill."""
    plan = reshard.plan(source, target)
    plan.verify()
    assert plan.moved_elements == plan.lower_bound_elements
    assert moved is None or plan.moved_elements == moved
    return plan


def same(found: Mapping[int, Any], expected: Mapping[int, NDArray[Any]]) -> bool:
    """Whether both have the same slots, and each slot the same array."""
    return found.keys() == expected.keys() and all(
        found[slot].dtype == array.dtype and np.array_equal(found[slot], array)
        for slot, array in expected.items()
    )


# Source slot, target slot, and where a box begins in the source shard, in the target shard, and
# its shape.
Row = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def rows(plan: reshard.Plan) -> set[Row]:
    """All boxes of a plan, those that stay included."""
    transfers = plan.transfers
    columns = (
        transfers.source_slot.tolist(),
        transfers.target_slot.tolist(),
        map(tuple, transfers.source_start.tolist()),
        map(tuple, transfers.target_start.tolist()),
        map(tuple, transfers.shape.tolist()),
    )
    found = list(zip(*columns, strict=True))
    assert len(set(found)) == len(found)
    return set(found)
