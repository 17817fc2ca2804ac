"""The test oracle: the elements of each device, by brute force.

It is a slow reference for the fast implementation, and uses no runs, intervals or overlaps. A cut
rule is evaluated index by index, by the definition of its system; a sharding by the coordinates of
each device; a movement by sets of elements. It is meant for tensors of some thousand elements at
most.

1. `rule_definitions` deals the indices of a dimension to parts.
2. `contents_of_spec` and its siblings number the elements of a tensor in row-major order and list,
   for every rank, the number at each position of its local array: `Contents`.
3. `shards_of` splits dense arrays accordingly, `dense_of` reassembles them.
4. `least_moved` counts the elements that a rank needs and does not have, as sets.

>>> from reshard import DeviceMesh, spec
>>> mesh = DeviceMesh.of(x=2, y=3)
>>> rows = contents_of_spec(spec(mesh, "x, y"), (6, 6))
>>> rows.elements[4].tolist()
[[20, 21], [26, 27], [32, 33]]
>>> least_moved(rows, contents_of_spec(spec(mesh, "y, x"), (6, 6)))
26
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import ShardError
from reshard.layout import Box
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from rule_definitions import NO_ELEMENT, Part, nested_parts

_SOURCE_ROLES = ("owned", "fresh halo")


Combines = Sequence[Sequence[int]]


def coordinate(mesh: DeviceMesh, position: int, axes: Iterable[Axis]) -> int:
    """Return the coordinate of the device at row-major `position` along `axes`, major to minor.

    >>> coordinate(DeviceMesh.of(x=8), 6, [Axis("x", 1, 2)])
    1
    """
    along: dict[str, tuple[int, int]] = {}
    for name, size in reversed(list(zip(mesh.axis_names, mesh.shape, strict=True))):
        position, here = divmod(position, size)
        along[name] = (here, size)
    result = 0
    for axis in axes:
        here, full = along[axis.name]
        size = full if axis.size is None else axis.size
        # A sub-axis takes some digits of the coordinate: `pre` counts those above, `below` those
        # below.
        below = full // (axis.pre * size)
        result = result * size + here // below % size
    return result


def _size(mesh: DeviceMesh, axes: Iterable[Axis]) -> int:
    full = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return math.prod(axis.size or full[axis.name] for axis in axes)


def places_of_dimension(mesh: DeviceMesh, dim: DimSpec, length: int, position: int) -> Part:
    """Return the places of a dimension on the device at row-major `position` of the mesh."""
    levels = [(level.rule, _size(mesh, level.axes)) for level in dim.levels]
    part = 0
    for level, (_, count) in zip(dim.levels, levels, strict=True):
        part = part * count + coordinate(mesh, position, level.axes)
    return nested_parts(levels, length)[part]


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The contents of every slot of a layout, element by element.

    `elements[slot]` has the slot's local shape, and the row-major number of the element at each
    position (`NO_ELEMENT` for padding). `is_source[slot]` marks the positions that may be a source.
    `contribution[slot]` is the contribution that the slot carries.
    """

    shape: tuple[int, ...]
    elements: Mapping[int, NDArray[np.int64]]
    is_source: Mapping[int, NDArray[np.bool_]]
    contribution: Mapping[int, int]
    contributions: int = 1
    reduction: str | None = None

    def held(self, slot: int) -> set[tuple[int, int]]:
        """Return the (element, contribution) pairs that a slot may be a source of."""
        if slot not in self.elements:
            return set()
        held = self.elements[slot][self.is_source[slot]].tolist()
        return {(element, self.contribution[slot]) for element in held}

    def missing(self) -> set[tuple[int, int]]:
        """Return the (element, contribution) pairs that no slot has."""
        every = {
            (element, contribution)
            for element in range(math.prod(self.shape))
            for contribution in range(self.contributions)
        }
        return every.difference(*(self.held(slot) for slot in self.elements))


def contents_of_spec(spec: ShardingSpec, shape: Sequence[int]) -> Contents:
    """Return the contents of every device of a sharding of a tensor of `shape`; slots are ranks."""
    mesh = spec.mesh
    elements, is_source, contribution = {}, {}, {}
    cache: dict[tuple[int, int], Part] = {}
    for position, rank in enumerate(mesh.devices):
        if any(coordinate(mesh, position, [Axis(axis)]) not in at for axis, at in spec.only):
            continue
        places: list[Part] = []
        for dim, length in zip(spec.dim_specs, shape, strict=True):
            part = (coordinate(mesh, position, dim.axes), len(places))
            if part not in cache:
                cache[part] = places_of_dimension(mesh, dim, length, position)
            places.append(cache[part])
        elements[rank], is_source[rank] = _product(places, shape)
        contribution[rank] = coordinate(mesh, position, spec.partial_axes)
    count = _size(mesh, spec.partial_axes)
    reduction = spec.reduction if count > 1 else None
    return Contents(tuple(shape), elements, is_source, contribution, count, reduction)


def _product(
    places: Sequence[Part], shape: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the elements at the product of the dimensions' places, and which may be sources."""
    local_shape = tuple(len(part) for part in places)
    elements = np.zeros(local_shape, dtype=np.int64)
    is_pad = np.zeros(local_shape, dtype=bool)
    is_source = np.ones(local_shape, dtype=bool)
    for dimension, part in enumerate(places):
        # A shape in which this dimension's places broadcast against those of the others.
        column = tuple(len(part) if d == dimension else 1 for d in range(len(shape)))
        stride = math.prod(shape[dimension + 1 :])
        elements += np.array([place.global_index * stride for place in part], np.int64).reshape(
            column
        )
        is_pad |= np.array([place.role == "pad" for place in part], bool).reshape(column)
        is_source &= np.array([place.role in _SOURCE_ROLES for place in part], bool).reshape(column)
    return np.where(is_pad, NO_ELEMENT, elements), is_source


def contents_of_boxes(shape: Sequence[int], boxes: Iterable[tuple[int, Box]]) -> Contents:
    """Return the contents of slots with `(slot, box)` pairs, in this order in memory."""
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(tuple(shape))
    pieces: dict[int, list[NDArray[np.int64]]] = {}
    for slot, box in boxes:
        window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        pieces.setdefault(slot, []).append(numbers[window])
    return _own_elements(
        shape,
        {
            slot: several[0] if len(several) == 1 else np.concatenate([p.ravel() for p in several])
            for slot, several in pieces.items()
        },
    )


def contents_of_whole(shape: Sequence[int], holders: Iterable[int]) -> Contents:
    """Return the contents of a whole tensor on each of the slots `holders`."""
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(tuple(shape))
    return _own_elements(shape, dict.fromkeys(holders, numbers))


def contents_of_flat_ranges(
    shape: Sequence[int],
    ranges: Mapping[int, tuple[int, int]],
    dims: int,
    local_shapes: Mapping[int, tuple[int, ...]] | None = None,
) -> Contents:
    """Return the contents of slots with ranges of the flattened leading `dims` dimensions.

    The local arrays are flat, or have `local_shapes`, if each range is a box.
    """
    width = math.prod(shape[dims:])
    elements = {}
    for slot, (start, stop) in ranges.items():
        numbers = [i * width + j for i in range(start, stop) for j in range(width)]
        local_shape = (len(numbers),) if local_shapes is None else local_shapes[slot]
        elements[slot] = np.array(numbers, dtype=np.int64).reshape(local_shape)
    return _own_elements(shape, elements)


def _own_elements(shape: Sequence[int], elements: dict[int, NDArray[np.int64]]) -> Contents:
    everywhere = {slot: np.ones(array.shape, dtype=bool) for slot, array in elements.items()}
    return Contents(tuple(shape), elements, everywhere, dict.fromkeys(elements, 0))


def shards_of(
    contents: Contents, dense: Sequence[NDArray[Any]], rubbish: Any = 0
) -> dict[int, NDArray[Any]]:
    """Return the local arrays of all slots, split from a dense array per contribution.

    Padding and stale copies are set to `rubbish`: nothing may depend on them.
    """
    shards = {}
    for slot, elements in contents.elements.items():
        whole = dense[contents.contribution[slot]].reshape(-1)
        shard = np.full(elements.shape, rubbish, dtype=whole.dtype)
        usable = contents.is_source[slot]
        shard[usable] = whole[elements[usable]]
        shards[slot] = shard
    return shards


def contributions_of(contents: Contents, shards: Mapping[int, NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the dense array of every contribution, assembled from shards.

    All positions of an element, including halos, must agree.

    Raises:
        ShardError: shards that disagree, have the wrong shape, are missing or superfluous, or an
            element that no shard has.
    """
    if set(shards) != set(contents.elements):
        raise ShardError(f"shards on {sorted(shards)}, expected {sorted(contents.elements)}")
    dtype = next(iter(shards.values())).dtype
    size = math.prod(contents.shape)
    dense = [np.zeros(size, dtype=dtype) for _ in range(contents.contributions)]
    # Of shape (contributions, elements): which elements some shard had.
    seen = np.zeros((contents.contributions, size), dtype=bool)
    for slot, elements in contents.elements.items():
        shard, carried = shards[slot], contents.contribution[slot]
        if shard.shape != elements.shape:
            raise ShardError(
                f"rank {slot} has shape {list(shard.shape)}, expected {list(elements.shape)}"
            )
        real = elements != NO_ELEMENT
        for element, value in zip(elements[real].tolist(), shard[real], strict=True):
            is_set = dense[carried][element]
            # Two copies must agree; a NaN agrees with a NaN.
            if (
                seen[carried, element]
                and value != is_set
                and not (value != value and is_set != is_set)
            ):
                raise ShardError(
                    f"element {element} is {value} on rank {slot} and {is_set} elsewhere"
                )
            dense[carried][element] = value
            seen[carried, element] = True
    if not seen.all():
        where = np.argwhere(~seen)[0].tolist()
        raise ShardError(f"no shard has element {where[1]} of contribution {where[0]}")
    return [array.reshape(contents.shape) for array in dense]


def reduced(reduction: str | None, dense: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Combine contributions, given as dense arrays, into the tensor that they represent.

    >>> reduced("mean", [np.array([1.0]), np.array([4.0])]).tolist()
    [2.5]
    """
    if reduction is None:
        return dense[0]
    operation = {
        "sum": np.add,
        "mean": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "product": np.multiply,
    }[reduction]
    total: NDArray[Any] = functools.reduce(operation, dense)
    return total / len(dense) if reduction == "mean" else total


def dense_of(contents: Contents, shards: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
    """Return the tensor that shards represent. Raises ShardError as `contributions_of` does."""
    return reduced(contents.reduction, contributions_of(contents, shards))


def least_moved(source: Contents, target: Contents, combines: Combines | None = None) -> int:
    """Return the fewest elements that must move if each slot keeps its elements.

    `combines[c]` are the source contributions that target contribution `c` is made of; all of
    them for each when None.
    """
    if combines is None:
        combines = [range(source.contributions)] * target.contributions
    moved = 0
    for slot, elements in target.elements.items():
        needed = {
            (element, contribution)
            for element in elements[elements != NO_ELEMENT].tolist()
            for contribution in combines[target.contribution[slot]]
        }
        moved += len(needed - source.held(slot))
    return moved
