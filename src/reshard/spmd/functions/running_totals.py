"""Cumulative sums along a sharded axis, without gathering it.

1. Each rank finds the running totals of its own part, as if nothing came before it.
2. The last one of every part but the last, which is the part's own total, goes to all ranks.
3. Their running totals say what comes before each part.
4. Each rank combines that with what it has.

        part 0     part 1     part 2
        1  2  3    4  5  6    7  8        an axis of 8 in 3 parts
        1  3  6    4  9 15    7 15        running totals of each part
        0          6         21           what comes before it
        1  3  6   10 15 21   28 36

So the ranks exchange one element per part instead of the axis. Floating-point numbers are added in
another order than from one end to the other, with equal or smaller errors. Source: Blelloch, Prefix
Sums and Their Applications, 1990.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import has_plain_parts, part_lengths
from reshard.spmd.functions.elementwise import add, multiply, whole
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

_COMBINE = {"cumulative_sum": add, "cumulative_prod": multiply}


def running_totals(name: str, x: Any, axis: int) -> Any:
    """Totals of everything up to each place of an axis, cut as it is.

    Args:
        name: `cumulative_sum` or `cumulative_prod`.
        x: an array, in its totals' element type.
        axis: counted from the start.
    """
    # Named: libraries add up whole numbers in their widest type else.
    dtype = {"dtype": x.dtype}
    parts = _find_parts(x, axis)
    # One operation where nothing is cut, where contributions wait, or where parts are so short that
    # exchanging their totals saves nothing.
    if len(parts) < 2 or x.type.spec.partial_axes or 2 * (len(parts) - 1) >= x.shape[axis]:
        return call(name, (x,), {"axis": axis}, dtype)
    spec = x.type.spec
    # Step 1 of the module: `own` is cut as `x` is.
    own = call(name, (x,), {"axis": axis, "parts": parts}, dtype)
    # Step 2: the last place of each part but the last one; each rank adds those it has.
    ends = whole(x, np.cumsum(parts)[:-1] - 1)
    ahead = call("take", (own, ends), {"axis": axis}).reduced()
    # Step 3: exclusive totals of the parts, the first one being 0 (or 1).
    before = call(name, (ahead,), {"axis": axis, "include_initial": True}, dtype)
    # Step 4: the part that each place is in, cut as the axis, looks up what comes before it.
    part_of = whole(x, np.repeat(np.arange(len(parts)), parts))
    along = ShardingSpec(spec.mesh, [spec.dim_specs[axis]])
    offsets = call("take", (before, part_of.shard(along)), {"axis": axis})
    return _COMBINE[name](own, offsets)


def _find_parts(x: Any, axis: int) -> tuple[int, ...]:
    """The lengths of the parts that have elements, in order; none where a part is no stretch."""
    spec = x.type.spec if isinstance(x, ArrayValue) else None
    if spec is None or not has_plain_parts(spec):
        return ()
    return part_lengths(spec, axis, x.shape[axis])
