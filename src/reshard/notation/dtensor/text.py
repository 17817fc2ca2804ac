"""Placements of a DTensor as a sharding, and a sharding as placements.

A DTensor has a mesh and one placement for each mesh axis. They are applied from left to right,
each to what those before it left, so a tensor dimension that several axes shard is cut in
levels, by ceil (`torch.chunk`)::

    mesh ("dp": 2, "tp": 2), [Shard(0), Shard(0)]            "dp / tp, ..."
    the same, [_StridedShard(0, split_factor=2), Shard(0)]   "dp@stride2 / tp, ..."
    the same, S(0)[1]S(0)[0]: in another order               "tp / dp, ..."
    the same, [Partial("sum"), Shard(1)]                     "-, tp | sum(dp)"

There:

1. Every placement is a value of `reshard.notation.dtensor.placements`, whether it was text or an
   object.
2. The axes that shard one dimension are put in the order in which they cut; each is a level.

And back: each level is the placement of its one axis, and where the axes of a dimension do not
cut in the order of the mesh, that order is written too. Objects of torch are read here like any
placement; `reshard.notation.dtensor.objects` reads whole DTensors and makes torch's objects.

Source: `torch.distributed.tensor` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from reshard.block_rules import Strided
from reshard.errors import LayoutError, NotationError
from reshard.mesh import DeviceMesh
from reshard.notation.dtensor.calls import read_calls
from reshard.notation.dtensor.mesh_text import split_mesh
from reshard.notation.dtensor.partitioned import PartitionedShard
from reshard.notation.dtensor.placements import (
    OPERATION_OF_REDUCTION,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    as_placement,
    placement_of_call,
)
from reshard.sharding import DimSpec, Level, ShardingSpec

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class DTensorPlacements:
    """One placement for each mesh axis, and which axis cuts a dimension before which.

    Attributes:
        placements: in the order of the mesh's axes.
        shard_order: for each tensor dimension that is cut, its mesh axes by number, the one that
            cuts first in front; torch's `shard_order`.
    """

    placements: tuple[Placement, ...]
    shard_order: ShardOrder

    @property
    def is_left_to_right(self) -> bool:
        """Whether every dimension is cut in the order of the mesh's axes, as torch does."""
        return all(list(axes) == sorted(axes) for _, axes in self.shard_order)

    def __str__(self) -> str:
        if self.is_left_to_right:
            return f"[{', '.join(map(str, self.placements))}]"
        step = {axis: i for _, axes in self.shard_order for i, axis in enumerate(axes)}
        several = {axis for _, axes in self.shard_order if len(axes) > 1 for axis in axes}
        words = [
            f"{placement}[{step[axis]}]" if axis in several else str(placement)
            for axis, placement in enumerate(self.placements)
        ]
        return f"[{', '.join(words)}]"


def parse_dtensor(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """The sharding that a list of placements writes.

    Args:
        text: in any form that torch prints: `[Shard(dim=0), Replicate()]`, `S(0)R`,
            `S(0)[1]S(0)[0]` with the order of the axes on one dimension. A
            `PartitionedShard` may be among them. A mesh may stand in front of them, as in a
            printed DTensor.
        mesh: the devices, where the text has none; one placement for each of its axes, major to
            minor.
        shape: of the tensor; placements do not say how many dimensions it has.

    Raises:
        NotationError: text that cannot be read, or that does not fit the mesh or the shape.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> print(parse_dtensor("[Shard(0), Shard(0)]", mesh, (6, 4)))
    dp / tp, -
    >>> print(parse_dtensor("S(0)[1]S(0)[0]", mesh, (6, 4)))
    tp / dp, -
    >>> print(parse_dtensor("P(avg) S(-1)", mesh, (6, 4)))
    -, tp | mean(dp)
    """
    try:
        mesh, placed = split_mesh(text, mesh)
        calls = read_calls(placed)
        if mesh is None or shape is None:
            missing = "mesh" if mesh is None else "shape"
            raise NotationError(
                f"placements do not say the tensor's {missing}; give a {missing} beside them"
            )
        placements = [placement_of_call(call) for call in calls]
        order = _order_steps(placements, [call.order for call in calls], len(shape))
        return sharding_of_placements(mesh, placements, len(shape), order)
    except LayoutError as error:
        if f"`{text}`" in str(error):
            raise
        raise type(error)(f"{error} (in the placements `{text}`)") from None


def dtensor_text(spec: ShardingSpec) -> str:
    """The placements of a sharding, as torch is given them.

    Axes that cut one dimension in another order than the mesh's are written with their steps,
    as torch prints a `shard_order`.

    Raises:
        NotationError: a sharding that DTensor cannot express; the message names the part.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> dtensor_text(ShardingSpec(mesh, [DimSpec([Level(["dp"], Strided(2)), Level(["tp"])])]))
    '[_StridedShard(0, split_factor=2), Shard(0)]'
    >>> dtensor_text(ShardingSpec(mesh, [DimSpec([Level(["tp"]), Level(["dp"])])]))
    '[Shard(0)[1], Shard(0)[0]]'
    >>> dtensor_text(ShardingSpec(mesh, [["dp", "tp"]]))
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: DTensor cannot say the level `dp tp` of dimension 0: each of its
    placements cuts over one mesh axis; write `dp / tp` for a cut of a cut
    """
    return str(placements_of(spec))


def parse_partitioned(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """The sharding that placements with a `PartitionedShard` among them write.

    One placement for each axis of `mesh`, as in `parse_dtensor`, which reads the same texts.

    Raises:
        NotationError: text that cannot be read, sizes that do not add up to the dimension.

    >>> mesh = DeviceMesh.of(ep=2)
    >>> print(parse_partitioned("PartitionedShard(0, 4, (6, 10, 12, 4))", mesh, (32,)))
    ep@blocks[6,10,12,4]
    """
    return parse_dtensor(text, mesh, shape)


def partitioned_text(spec: ShardingSpec) -> str:
    """The placements of a sharding, partitioned ones included.

    Raises:
        NotationError: a sharding that placements cannot express.

    >>> mesh = DeviceMesh.of(dp=2, ep=2)
    >>> partitioned_text(ShardingSpec(mesh, [["dp"], []]))
    '[Shard(0), Replicate()]'
    """
    return str(placements_of(spec, partitioned=True))


def sharding_of_placements(
    mesh: DeviceMesh,
    placements: Iterable[object],
    ndim: int,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
) -> ShardingSpec:
    """The sharding that placements say, given as values or as torch's own objects.

    Args:
        mesh: the devices.
        placements: one for each axis of the mesh.
        ndim: dimensions of the tensor.
        shard_order: for each cut dimension the numbers of its mesh axes, the one that cuts first
            in front, as torch's `DTensorSpec.shard_order`; by rising number when None.

    Raises:
        NotationError: a wrong number of placements, a dimension the tensor has not, several
            kinds of reduction, or an order that does not fit the placements.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> print(sharding_of_placements(mesh, [Shard(1), StridedShard(1, 2)], 2))
    -, dp / tp@stride2
    """
    order = None
    if shard_order is not None:
        order = tuple((int(dim), tuple(map(int, axes))) for dim, axes in shard_order)
    return _make_sharding(mesh, tuple(map(as_placement, placements)), ndim, order)


# Tensors of a model are cut alike, and again and again.
@lru_cache(maxsize=1024)
def _make_sharding(
    mesh: DeviceMesh, values: tuple[Placement, ...], ndim: int, shard_order: ShardOrder | None
) -> ShardingSpec:
    if len(values) != len(mesh.shape):
        raise NotationError(
            f"{len(values)} placements for a mesh of {len(mesh.shape)} axes ({mesh.text}); give "
            "one for each axis, major to minor"
        )
    # Levels of each dimension by number of the mesh axis; their order comes below.
    by_dim: dict[int, dict[int, Level]] = {dim: {} for dim in range(ndim)}
    partial: list[str] = []
    reductions: list[str] = []
    for number, (axis, value) in enumerate(zip(mesh.axis_names, values, strict=True)):
        if isinstance(value, Partial):
            partial.append(axis)
            reductions.append(value.reduction)
        elif not isinstance(value, Replicate):
            level = _make_level(axis, value, mesh.shape[number])
            by_dim[_check_dimension(value, ndim)][number] = level
    if len(set(reductions)) > 1:
        raise NotationError(
            f"contributions are reduced in several ways, {' and '.join(sorted(set(reductions)))}; "
            "a tensor is partial in one, redistribute the other axes first"
        )
    order = _check_order(shard_order, by_dim)
    dim_specs = [DimSpec([levels[n] for n in order[dim]]) for dim, levels in by_dim.items()]
    return ShardingSpec(mesh, dim_specs, (), partial, reductions[0] if reductions else "sum")


def _make_level(axis: str, value: Shard | StridedShard | PartitionedShard, size: int) -> Level:
    if isinstance(value, PartitionedShard):
        if value.by_rank is not None and len(value.by_rank) != size:
            raise NotationError(
                f"{value} gives sizes for {len(value.by_rank)} ranks, but axis {axis} has {size}; "
                "give one row for each"
            )
        return Level([axis], value.rule)
    return Level([axis], Strided(value.split_factor) if isinstance(value, StridedShard) else None)


def _check_dimension(value: Shard | StridedShard | PartitionedShard, ndim: int) -> int:
    if not -ndim <= value.dim < ndim:
        raise NotationError(
            f"{value} cuts dimension {value.dim} of a tensor that has {ndim}; give one from "
            f"{-ndim} to {ndim - 1}"
            if ndim
            else f"{value} cuts a tensor that has no dimensions; it can only be replicated or "
            "partial"
        )
    return value.dim % ndim


def _order_steps(
    placements: Sequence[Placement], steps: Sequence[int | None], ndim: int
) -> ShardOrder | None:
    """The order that the numbers behind placements give, `S(0)[1]S(0)[0]`; None without any."""
    if all(step is None for step in steps):
        return None
    by_dim: dict[int, list[int]] = {}
    for number, (value, step) in enumerate(zip(placements, steps, strict=True)):
        if not isinstance(value, Replicate | Partial):
            by_dim.setdefault(_check_dimension(value, ndim), []).append(number)
        elif step is not None:
            raise NotationError(
                f"{value}[{step}] on mesh axis {number}: only axes that cut have an order"
            )
    order = []
    for dim, numbers in sorted(by_dim.items()):
        # An axis alone on its dimension needs no step.
        at = {steps[number]: number for number in numbers} if len(numbers) > 1 else {0: numbers[0]}
        if set(at) != set(range(len(numbers))):
            raise NotationError(
                f"the axes on dimension {dim} have the steps {[steps[n] for n in numbers]}; give "
                f"each one of 0 to {len(numbers) - 1}"
            )
        order.append((dim, tuple(at[step] for step in range(len(numbers)))))
    return tuple(order)


def _check_order(
    shard_order: ShardOrder | None, by_dim: dict[int, dict[int, Level]]
) -> dict[int, list[int]]:
    """The axes of every dimension, by number, in the order in which they cut."""
    rising = {dim: sorted(levels) for dim, levels in by_dim.items()}
    if shard_order is None:
        return rising
    order = {dim: list(axes) for dim, axes in shard_order}
    cut = {dim: axes for dim, axes in rising.items() if axes}
    if {dim: sorted(axes) for dim, axes in order.items()} != cut:
        raise NotationError(
            f"shard order {order} does not fit the placements, which cut {cut}; name every axis of "
            "every cut dimension once"
        )
    return rising | order


def placements_of(spec: ShardingSpec, *, partitioned: bool = False) -> DTensorPlacements:
    """The placements of a sharding, and the order in which the axes of a dimension cut.

    Args:
        spec: the sharding.
        partitioned: whether `PartitionedShard` may be used beside torch's own placements.

    Raises:
        NotationError: a part that no placement says: an axis taken in part, a flat cut over
            several axes, another rule, marks for propagation, a place on some ranks only.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> found = placements_of(ShardingSpec(mesh, [DimSpec([Level(["tp"]), Level(["dp"])])]))
    >>> found.shard_order
    ((0, (1, 0)),)
    """
    mesh = spec.mesh
    found: dict[str, Placement] = {}
    order: list[tuple[int, tuple[int, ...]]] = []
    if spec.only:
        raise cannot_say(f"`only` of axis {spec.only[0][0]}", "every rank of the mesh has a part")
    for dim, dim_spec in enumerate(spec.dim_specs):
        if dim_spec.is_open or dim_spec.priority:
            raise cannot_say(
                f"`{dim_spec}` of dimension {dim}", "placements have no marks for propagation"
            )
        for level in dim_spec.levels:
            axis = _expect_whole_axis(level, dim)
            found[axis] = _find_placement(level, dim, mesh.axis_size(axis), partitioned)
        axes = tuple(mesh.axis_names.index(level.axes[0].name) for level in dim_spec.levels)
        if axes:
            order.append((dim, axes))
    partial = [axis.name for axis in spec.partial_axes]
    if not all(axis.is_full for axis in spec.partial_axes):
        raise cannot_say(f"the partial axes {spec.partial_axes}", "it takes mesh axes whole")
    # Contributions are numbered by their axes, major to minor: another order is another numbering.
    if partial != [axis for axis in mesh.axis_names if axis in partial]:
        raise cannot_say(
            f"the order of the partial axes {' '.join(partial)}",
            "contributions are numbered in the order of the mesh's axes",
        )
    if spec.reduction is not None:
        found |= dict.fromkeys(partial, Partial(OPERATION_OF_REDUCTION[spec.reduction]))
    placements = tuple(found.get(axis, Replicate()) for axis in mesh.axis_names)
    return DTensorPlacements(placements, tuple(order))


def cannot_say(part: str, because: str) -> NotationError:
    return NotationError(f"DTensor cannot say {part}: {because}")


def _expect_whole_axis(level: Level, dim: int) -> str:
    if len(level.axes) > 1:
        nested = " / ".join(map(str, level.axes))
        raise cannot_say(
            f"the level `{level}` of dimension {dim}",
            f"each of its placements cuts over one mesh axis; write `{nested}` for a cut of a cut",
        )
    if not level.axes[0].is_full:
        raise cannot_say(
            f"the axis `{level.axes[0]}` of dimension {dim}",
            "it takes mesh axes whole; split the axis in the mesh",
        )
    return level.axes[0].name


def _find_placement(
    level: Level, dim: int, size: int, partitioned: bool
) -> Shard | StridedShard | PartitionedShard:
    if level.rule.is_default:
        return Shard(dim)
    if isinstance(level.rule, Strided) and level.rule.local_lengths is None:
        return StridedShard(dim, level.rule.stride)
    words = ["by ceil (Shard)", "by a stride (_StridedShard)"]
    if partitioned:
        found = PartitionedShard.from_rule(dim, level.rule, size)
        if found is not None:
            return found
        words.append("in partitions (PartitionedShard)")
    raise cannot_say(
        f"the rule `{level.rule.text}` of dimension {dim}",
        f"its placements cut {', '.join(words[:-1])} or {words[-1]}",
    )
