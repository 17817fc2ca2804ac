"""Placements of DTensor as plain values: what one mesh axis does to a tensor.

PyTorch's DTensor describes a tensor by one *placement* for each mesh axis. Here they are plain
values, so that they can be read and written without torch::

    Shard(dim=0)                              cut dimension 0 by ceil
    _StridedShard(dim=0, split_factor=2)      2 blocks by ceil, each cut over the axis
    PartitionedShard(0, 4, (4, 6, 4, 2))      blocks of these sizes, each cut or left whole
    Replicate()                               copies
    Partial(sum)                              contributions

A call that `reshard.notation.dtensor.calls` has read, or an object of torch, becomes a placement
by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from reshard.errors import NotationError
from reshard.notation.dtensor.calls import Argument, PlacementCall, is_numbers
from reshard.notation.dtensor.partitioned import PartitionedShard, Splits

REDUCTION_OF_OPERATION = {
    "sum": "sum",
    "avg": "mean",
    "max": "max",
    "min": "min",
    "product": "product",
}
OPERATION_OF_REDUCTION = {name: operation for operation, name in REDUCTION_OF_OPERATION.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """The dimension `dim`, cut by ceil as `torch.chunk` does; a negative `dim` counts from the end.

    >>> print(Shard(0))
    Shard(0)
    """

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """`split_factor` blocks of the dimension `dim` by ceil, each cut by ceil; torch's
    `_StridedShard`.

    >>> print(StridedShard(0, 2))
    _StridedShard(0, split_factor=2)
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise NotationError(
                f"_StridedShard with split_factor {self.split_factor}; it must be at least 1"
            )

    def __str__(self) -> str:
        return f"_StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copies along the axis.

    >>> print(Replicate())
    Replicate()
    """

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Contributions along the axis, still to be reduced by torch's `operation`.

    >>> print(Partial("avg"), Partial("avg").reduction)
    Partial(avg) mean
    """

    operation: str = "sum"

    def __post_init__(self) -> None:
        if self.operation not in REDUCTION_OF_OPERATION:
            raise NotationError(
                f"Partial({self.operation}): the reductions are "
                f"{', '.join(REDUCTION_OF_OPERATION)}; redistribute the tensor first"
            )

    @property
    def reduction(self) -> str:
        """The reduction by reshard's name."""
        return REDUCTION_OF_OPERATION[self.operation]

    def __str__(self) -> str:
        return f"Partial({self.operation})"


Placement = Shard | StridedShard | PartitionedShard | Replicate | Partial


def placement_of_call(call: PlacementCall) -> Placement:
    """The placement that a call means.

    Raises:
        NotationError: a name that is no placement of DTensor, or arguments of another form.

    >>> print(placement_of_call(PlacementCall("_StridedShard", (0,), (("sf", 2),))))
    _StridedShard(0, split_factor=2)
    """
    match call.name:
        case "Shard":
            return Shard(_expect_integer(call, call.bound("dim"), "dim"))
        case "_StridedShard":
            bound = call.bound("dim", "split_factor", sf="split_factor")
            return StridedShard(
                _expect_integer(call, bound, "dim"), _expect_integer(call, bound, "split_factor", 1)
            )
        case "Replicate":
            call.bound()
            return Replicate()
        case "Partial":
            return Partial(str(call.bound("reduce_op").get("reduce_op", "sum")))
        case "PartitionedShard":
            bound = call.bound("dim", "num_partitions", "splits", "aligned")
            return PartitionedShard(
                _expect_integer(call, bound, "dim"),
                _expect_integer(call, bound, "num_partitions"),
                _expect_splits(call, bound.get("splits")),
                _expect_truth(call, bound.get("aligned", "False")),
            )
    raise NotationError(
        f"{call.name} cuts several dimensions as one, which a sharding cannot say; read it with "
        "`reshard.notation.dtensor.ragged`, which answers with a layout"
    )


def _expect_integer(
    call: PlacementCall, bound: Mapping[str, Argument], name: str, default: int | None = None
) -> int:
    value = bound.get(name, default)
    if not isinstance(value, int):
        raise NotationError(f"{call.name} needs a number for {name}, got {value!r}")
    return value


def _expect_splits(call: PlacementCall, value: Argument | None) -> Splits:
    if is_numbers(value) or (isinstance(value, tuple) and all(map(is_numbers, value))):
        return cast(Splits, value)
    raise NotationError(
        f"{call.name} needs splits such as (4, 6, 4, 2), or a row of them for each rank, "
        f"got {value!r}"
    )


def _expect_truth(call: PlacementCall, value: Argument) -> bool:
    if value not in ("True", "False"):
        raise NotationError(f"{call.name} needs True or False for aligned, got {value!r}")
    return value == "True"


def as_placement(item: object) -> Placement:
    """A placement from a placement, or from an object of torch, which is not imported.

    Raises:
        NotationError: anything else, and torch's placements that reshard has no word for.

    >>> as_placement(Replicate())
    Replicate()
    """
    if isinstance(item, Placement):
        return item
    # Known by names, so that torch is not imported.
    names = [kind.__name__ for kind in type(item).__mro__ if kind.__module__.startswith("torch")]
    # A subclass may mean more than its base, as a masked partial does, so only the class counts.
    live: Any = item
    match names[0] if names and type(item).__name__ == names[0] else "":
        case "Shard":
            return Shard(int(live.dim))
        case "_StridedShard":
            return StridedShard(int(live.dim), int(live.split_factor))
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(str(live.reduce_op))
    raise NotationError(
        f"placement {item!s} of type {type(item).__name__} is not known; known are Shard, "
        "_StridedShard, Replicate, Partial and PartitionedShard"
    )
