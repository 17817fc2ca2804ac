"""Ragged shards: parts that are ranges of flattened dimensions.

A `RaggedShard` flattens the leading dimensions of a tensor, and gives each rank of a mesh axis
as many of their indices, in proportion, as its `local_units`::

    shape (4, 4), RaggedShard(dims=(0, 1), local_units=(3, 5))

    +-----------+
    | 0  0  0  0|     16 indices, 2 to the unit:
    | 0  0 +----+     rank 0 has 0:6, rank 1 has 6:16
    +------+ 1  1|
    | 1  1  1  1|
    | 1  1  1  1|
    +-----------+

1. The other placements are applied first, whatever their position in the list, as in DTensor; the
   ragged axis holds copies so far.
2. A rank's part is then sharded again: the leading dimensions of its *local* shape are flattened,
   its range of them is written as boxes, and a box is read through the runs of the first split.

The result is not a product of splits of single dimensions, so it is a `Layout`.

Source: `RaggedShard` of veScale (`vescale.dtensor.placement_types`), as in its FSDP.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from reshard._records import Record
from reshard._validation import check_ints
from reshard.errors import NotationError
from reshard.layout import Box, Layout, flat_range_boxes
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor
from reshard.notation.parsing import reading
from reshard.runs import Run, RunTable
from reshard.sharding import ShardingSpec

_RAGGED_NAMES = ("RaggedShard", "_StridedRaggedShard")


class RaggedShard(Record):
    """Flattened leading dimensions, sharded over a mesh axis in proportion to units.

    Args:
        dims: the dimensions, `(0,)`, `(0, 1)` and so on.
        local_units: how many units each rank of the axis has, shape `(ranks,)`.

    Raises:
        NotationError: dimensions that are not leading, units that are negative or missing.

    >>> RaggedShard((0, 1), (3, 5)).ranges(16)
    ((0, 6), (6, 16))
    >>> RaggedShard((0,), (3, 5)).ranges(4)
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: RaggedShard(dims=(0,), local_units=(3, 5)) divides 4 indices into
    8 units, and rank 0 would end inside an index; flatten more leading dimensions, or give other
    units
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("dims", "local_units"):
            what = f"{name} of a RaggedShard"
            numbers = check_ints(getattr(self, name), what, NotationError, minimum=None)
            object.__setattr__(self, name, numbers)
        if not self.dims or self.dims != tuple(range(len(self.dims))):
            raise NotationError(
                f"{self} flattens dimensions {self.dims}; give leading dimensions, such as (0, 1)"
            )
        if any(unit < 0 for unit in self.local_units) or not sum(self.local_units):
            raise NotationError(
                f"{self} has units {self.local_units}; they must not be negative or all 0"
            )

    def ranges(self, indices: int) -> tuple[tuple[int, int], ...]:
        """Return the range of `indices` flattened indices that each rank has: `(start, stop)`.

        Raises:
            NotationError: a rank that would end inside an index.
        """
        units = sum(self.local_units)
        stops = []
        for rank, before in enumerate(itertools.accumulate(self.local_units)):
            # Exact or refused, as in veScale: no rank may end inside an index.
            stop, rest = divmod(before * indices, units)
            if rest:
                raise NotationError(
                    f"{self} divides {indices} indices into {units} units, and rank {rank} would "
                    "end inside an index; flatten more leading dimensions, or give other units"
                )
            stops.append(stop)
        return tuple(itertools.pairwise((0, *stops)))

    def __str__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"


def parse_ragged(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> Layout:
    """Return the layout of placements, one of which is a `RaggedShard`.

    Args:
        text: `RaggedShard(dims=(0, 1), local_units=(1, 1, 0, 0))`, alone or in a list with
            DTensor's placements after it.
        mesh: the devices; a placement for each of its axes. When None, ranks 0, 1, 2... for
            the units of a ragged shard without other placements.
        shape: of the tensor.

    Raises:
        NotationError: text that cannot be read, or that does not fit the mesh or the shape.

    >>> parse_ragged("RaggedShard(dims=(0,), local_units=(1, 3))", shape=(4, 2)).boxes(1)
    (Box(start=(1, 0), stop=(4, 2)),)
    """
    with reading("placements", text):
        if shape is None:
            raise NotationError("the placements lack the tensor's shape; give a shape")
        mesh, placed = dtensor.split_mesh(text, mesh)
        placements = [
            _read_ragged(call) if call.name in _RAGGED_NAMES else dtensor.placement_of_call(call)
            for call in dtensor.read_calls(placed)
        ]
        if mesh is None:
            if len(placements) != 1 or not isinstance(placements[0], RaggedShard):
                raise NotationError("the placements lack the tensor's mesh; give a mesh")
            mesh = DeviceMesh.of(ranks=len(placements[0].local_units))
        return ragged_layout(mesh, placements, shape)


def _read_ragged(call: dtensor.PlacementCall) -> RaggedShard:
    bound = call.bound("dims", "local_units", "split_factor")
    dims, units = bound.get("dims"), bound.get("local_units")
    if not dtensor.is_numbers(dims) or not dtensor.is_numbers(units):
        raise NotationError(
            f"{call.name} needs dims and local_units, such as RaggedShard((0, 1), (1, 1, 0, 0)); "
            f"got {dims!r} and {units!r}"
        )
    return RaggedShard(dims, units)


def ragged_text(spec: ShardingSpec | Layout) -> str:
    """Return the `RaggedShard` of a layout over ranks 0, 1, 2..., on the fewest leading dimensions.

    Raises:
        NotationError: a layout whose ranks do not hold consecutive ranges, or a
            sharding, which shards its dimensions separately.

    >>> layout = Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})
    >>> ragged_text(layout)
    'RaggedShard(dims=(0, 1), local_units=(3, 5))'
    """
    if isinstance(spec, ShardingSpec):
        raise NotationError(
            f"a ragged shard cannot express the sharding `{spec}`, which shards each dimension; "
            "give a layout, such as spec.layout(shape), if its ranks hold flat ranges"
        )
    for dims in range(1, spec.ndim + 1):
        shard = _find_shard(spec, dims)
        if shard is not None:
            return str(shard)
    raise NotationError(
        f"a ragged shard cannot express {spec!r}: its ranks do not hold consecutive ranges of the "
        "flattened leading dimensions, in the order of the ranks"
    )


def _find_shard(layout: Layout, dims: int) -> RaggedShard | None:
    """Return the ragged shard over `dims` leading dimensions with this layout."""
    counts = [0] * layout.slots
    for slot, local in zip(layout.cell_slot.tolist(), layout.cell_shape.tolist(), strict=True):
        counts[slot] += math.prod(local[:dims])
    # Units in lowest terms; for a tensor without elements, a unit each.
    divisor = math.gcd(*counts)
    units = [count // divisor for count in counts] if divisor else [1] * layout.slots
    stops = list(itertools.accumulate(counts, initial=0))
    if stops[-1] != math.prod(layout.shape[:dims]):
        return None
    ranges = dict(enumerate(itertools.pairwise(stops)))
    # Equal layouts are the same object.
    if Layout.flat_ranges(layout.shape, ranges, dims, layout.slots) is not layout:
        return None
    return RaggedShard(tuple(range(dims)), tuple(units))


def ragged_layout(mesh: DeviceMesh, placements: Iterable[object], shape: Sequence[int]) -> Layout:
    """Return the layout for placements, one of which is a `RaggedShard`.

    Args:
        mesh: the devices.
        placements: one per axis of the mesh: values, or objects of torch and veScale. The
            ragged placement precedes all that are not `Replicate()`, as veScale asks.
        shape: of the tensor.

    Raises:
        NotationError: no ragged placement, several, or a ragged placement after another shard;
            units for another number of ranks, or that end inside an index.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> shard = RaggedShard((0,), (1, 2))
    >>> layout = ragged_layout(mesh, [shard, dtensor.Replicate()], (6, 2))
    >>> [layout.local_shape(rank) for rank in range(4)]
    [(2, 2), (2, 2), (4, 2), (4, 2)]
    """
    items = [_as_ragged(item) for item in placements]
    ragged = [(n, item) for n, item in enumerate(items) if isinstance(item, RaggedShard)]
    if len(ragged) != 1:
        raise NotationError(f"{len(ragged)} ragged shards among the placements; there must be one")
    ((number, shard),) = ragged
    # For the other placements, the ragged axis holds copies.
    others = [
        dtensor.Replicate() if n == number else dtensor.as_placement(item)
        for n, item in enumerate(items)
    ]
    before = [str(item) for item in others[:number] if not isinstance(item, dtensor.Replicate)]
    if before:
        raise NotationError(
            f"{before[0]} precedes {shard}, but is applied first in any position; put the ragged "
            "shard before all placements but Replicate()"
        )
    spec = dtensor.sharding_of_placements(mesh, others, len(shape))
    if len(shard.dims) > len(shape):
        raise NotationError(
            f"{shard} flattens {len(shard.dims)} dimensions of a tensor of {len(shape)}"
        )
    if len(shard.local_units) != mesh.shape[number]:
        raise NotationError(
            f"{shard} has units for {len(shard.local_units)} ranks, but axis "
            f"{mesh.axis_names[number]} has {mesh.shape[number]}; give a number for each rank"
        )
    along = mesh.coordinates([mesh.axis_names[number]]).tolist()
    return _cut_ranges(spec.layout(shape), shard, dict(zip(mesh.devices, along, strict=True)))


def _as_ragged(item: object) -> object:
    """Convert a ragged shard of veScale; return other values unchanged."""
    if type(item).__name__ in _RAGGED_NAMES and not isinstance(item, RaggedShard):
        live: Any = item
        return RaggedShard(tuple(live.dims), tuple(live.local_units))
    return item


def _cut_ranges(base: Layout, shard: RaggedShard, coordinate: Mapping[int, int]) -> Layout:
    """Return the layout where each slot keeps its range of what it has in `base`.

    `coordinate` gives the number of the shard's range for each slot.
    """
    cells: list[tuple[int, list[tuple[int, int, int]], int]] = []
    width = len(shard.dims)
    # Many ranks have parts of few lengths.
    ranges = cache(shard.ranges)
    for cell, slot in enumerate(base.cell_slot.tolist()):
        local = tuple(base.cell_shape[cell].tolist())
        window = ranges(math.prod(local[:width]))[coordinate[slot]]
        # The rank's range of flattened indices as boxes; a rank without any has an empty box.
        leading = flat_range_boxes(local[:width], *window)
        for box in leading or [Box((0,) * width, (0,) * width)]:
            start, stop = box.start + (0,) * (len(local) - width), box.stop + local[width:]
            pieces = list(zip(base.cell_part[cell].tolist(), start, stop, strict=True))
            cells.append((slot, pieces, int(base.cell_contribution[cell])))
    tables, columns = [], []
    for dim, table in enumerate(base.tables):
        # Each window of a part that occurs becomes a part of a new table.
        chosen = sorted({pieces[dim] for _, pieces, _ in cells})
        number = {piece: i for i, piece in enumerate(chosen)}
        rows = [row for piece, i in number.items() for row in _read_window(table, i, *piece)]
        tables.append(RunTable(table.dimension_length, len(chosen), rows))
        columns.append([number[pieces[dim]] for _, pieces, _ in cells])
    return base.replace(
        tables=tables,
        cell_slot=[slot for slot, _, _ in cells],
        cell_part=np.array(columns, dtype=np.int64).T,
        cell_contribution=[carried for _, _, carried in cells],
    )


def _read_window(table: RunTable, number: int, part: int, start: int, stop: int) -> Iterator[Run]:
    """Yield the local positions `start:stop` of a part, as runs of the part `number` of a table."""
    for begin, end, local, role in table.runs_of(part):
        low, high = max(start, local), min(stop, local + end - begin)
        if low < high:
            yield Run(number, begin + low - local, high - low, low - start, role=role)
