"""What PyTorch's operators do to origins.

Views need nothing: they share the memory. What makes a new memory, or writes to one, is told here
for the operators that move elements; of all others the results are made, not copied.

A function takes the tracer of memories (`Memories`), the operator's arguments and its result, and
answers with the map of the result, or None where it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from reshard.torch.loaders.element_map import find_boxes
from reshard.torch.loaders.origins import Filled, Made, Origin, Taken, joined_origin
from reshard.torch.loaders.region_map import (
    RegionMap,
    TensorRegion,
    concatenated,
    cut_away,
    find_progressions,
)

# The most elements that are looked at one by one, for masks and indices along several dimensions.
MOST_ELEMENTS = 1 << 22


class Memories(Protocol):
    """What is known of the tensors of a run."""

    def read(self, tensor: torch.Tensor) -> RegionMap:
        """What a tensor has."""

    def write(self, tensor: torch.Tensor, written: RegionMap) -> None:
        """Write to the memory of a tensor what has its shape."""

    def cast(self, given: RegionMap, dtype: torch.dtype, to: torch.dtype) -> RegionMap:
        """Elements of one type as another."""

    def note_read(self, origins: Sequence[Origin | None]) -> None:
        """Say that the values of elements were looked at."""


Operator = Callable[..., RegionMap | None]


def _copy_whole(
    memories: Memories, result: Any, tensor: torch.Tensor, *_: Any, **__: Any
) -> RegionMap:
    return memories.cast(memories.read(tensor), tensor.dtype, result.dtype)


def _concatenate(
    memories: Memories, result: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> RegionMap:
    # Empty tensors of one dimension join anything.
    some = [one for one in tensors if one.shape != (0,) or result.shape == (0,)]
    maps = [memories.cast(memories.read(one), one.dtype, result.dtype) for one in some]
    return concatenated(maps, dim % max(result.dim(), 1))


def _stack(
    memories: Memories, result: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> RegionMap:
    dim %= result.dim()
    maps = [memories.cast(memories.read(one), one.dtype, result.dtype) for one in tensors]
    return concatenated([one.unsqueezed(dim) for one in maps], dim)


def _repeat(memories: Memories, result: Any, tensor: torch.Tensor, repeats: Sequence[int]) -> Any:
    return memories.read(tensor).repeated(repeats)


def _pad(
    memories: Memories, result: Any, tensor: torch.Tensor, pad: Sequence[int], value: float = 0
) -> RegionMap:
    # Pairs from the last dimension backwards.
    before, after = [0] * tensor.dim(), [0] * tensor.dim()
    for i in range(len(pad) // 2):
        before[-1 - i], after[-1 - i] = pad[2 * i], pad[2 * i + 1]
    return memories.read(tensor).padded(before, after, value)


def _flip(memories: Memories, result: Any, tensor: torch.Tensor, dims: Sequence[int]) -> RegionMap:
    found = memories.read(tensor)
    for dim in dims:
        size = tensor.shape[dim]
        found = found.taken_at(dim % tensor.dim(), range(size - 1, -1, -1))
    return found


def _roll(
    memories: Memories,
    result: Any,
    tensor: torch.Tensor,
    shifts: Sequence[int],
    dims: Sequence[int] = (),
) -> RegionMap | None:
    if len(shifts) != len(dims):
        return None
    found = memories.read(tensor)
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.shape[dim]
        found = found.taken_at(dim % tensor.dim(), [(i - shift) % size for i in range(size)])
    return found


def _select_indices(
    memories: Memories, result: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor
) -> RegionMap | None:
    numbers = known_numbers(memories, index)
    if numbers is None or not tensor.dim():
        return None
    return memories.read(tensor).taken_at(dim % tensor.dim(), numbers)


def _index(
    memories: Memories, result: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> RegionMap | None:
    at = find_single_index(memories, tensor, indices)
    if at is not None:
        return memories.read(tensor).taken_at(*at)
    places = _number_elements(memories, tensor, indices)
    return None if places is None else _take_elements(memories, tensor, places[tuple(indices)])


def _gather(
    memories: Memories, result: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor, **_: Any
) -> RegionMap | None:
    places = _number_elements(memories, tensor, [index])
    return None if places is None else _take_elements(memories, tensor, places.gather(dim, index))


def _take(
    memories: Memories, result: Any, tensor: torch.Tensor, index: torch.Tensor
) -> RegionMap | None:
    places = _number_elements(memories, tensor, [index])
    return None if places is None else _take_elements(memories, tensor, places.take(index))


def _choose(
    memories: Memories, result: Any, mask: torch.Tensor, one: torch.Tensor, other: torch.Tensor
) -> RegionMap | None:
    if not is_known(memories, mask) or result.numel() > MOST_ELEMENTS:
        return None
    both = [
        memories.cast(memories.read(side), side.dtype, result.dtype).broadcast(result.shape)
        for side in (one, other)
    ]
    # Boxes in which the mask is the same.
    flags = mask.expand(result.shape).to(torch.int64).numpy()
    found: list[TensorRegion] = []
    for start, stop, constants, _, _ in find_boxes([], [flags]):
        part = both[1 - constants[0]]
        for d, (low, high) in enumerate(zip(start, stop, strict=True)):
            part = part.narrowed(d, low, high)
        found += (
            TensorRegion(_add(region.start, start), _add(region.stop, start), region.origin)
            for region in part.regions
        )
    return RegionMap(tuple(result.shape), tuple(found))


def _fill_masked(
    memories: Memories, result: Any, tensor: torch.Tensor, mask: torch.Tensor, value: Any
) -> RegionMap | None:
    number = _find_value(memories, value)
    if number is None:
        return None
    return _choose(memories, result, mask, torch.tensor(number, dtype=tensor.dtype), tensor)


def _constant(value: float) -> Operator:
    def fill(memories: Memories, result: Any, *_: Any, **__: Any) -> RegionMap:
        return RegionMap.of(result.shape, Filled(value))

    return fill


def _full(memories: Memories, result: Any, shape: Any, value: float, **_: Any) -> RegionMap:
    return RegionMap.of(result.shape, Filled(float(value)))


def _scalar(memories: Memories, result: Any, value: float, **_: Any) -> RegionMap:
    return RegionMap.of(result.shape, Filled(float(value)))


def _nothing(memories: Memories, result: Any, *_: Any, **__: Any) -> RegionMap:
    return RegionMap.of(result.shape, None)


# What operators write to their first argument: the whole of it anew, as a map of its shape.


def _copy_into(
    memories: Memories, result: Any, tensor: torch.Tensor, source: torch.Tensor, *_: Any
) -> RegionMap:
    written = memories.cast(memories.read(source), source.dtype, tensor.dtype)
    return written.broadcast(tensor.shape)


def _fill(memories: Memories, result: Any, tensor: torch.Tensor, value: Any) -> RegionMap:
    number = _find_value(memories, value)
    if number is not None:
        return RegionMap.of(tensor.shape, Filled(number))
    return memories.cast(memories.read(value), value.dtype, tensor.dtype).broadcast(tensor.shape)


def _copy_to_indices(
    memories: Memories,
    result: Any,
    tensor: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
) -> RegionMap | None:
    numbers = known_numbers(memories, index)
    if numbers is None or not tensor.dim():
        return None
    dim %= tensor.dim()
    return write_at(memories.read(tensor), dim, numbers, memories.read(source))


def _fill_indices(
    memories: Memories,
    result: Any,
    tensor: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    value: Any,
) -> RegionMap | None:
    numbers, number = known_numbers(memories, index), _find_value(memories, value)
    if numbers is None or number is None or not tensor.dim():
        return None
    dim %= tensor.dim()
    shape = (*tensor.shape[:dim], len(numbers), *tensor.shape[dim + 1 :])
    return write_at(memories.read(tensor), dim, numbers, RegionMap.of(shape, Filled(number)))


def _put(
    memories: Memories,
    result: Any,
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    *_: Any,
) -> RegionMap | None:
    at = None if accumulate else find_single_index(memories, tensor, indices)
    if at is None:
        return None
    dim, numbers = at
    shape = (*tensor.shape[:dim], len(numbers), *tensor.shape[dim + 1 :])
    written = memories.cast(memories.read(values), values.dtype, tensor.dtype).broadcast(shape)
    return write_at(memories.read(tensor), dim, numbers, written)


def write_at(old: RegionMap, dim: int, numbers: Sequence[int], written: RegionMap) -> RegionMap:
    """A map with another written at indices of a dimension, the last one where one comes twice."""
    regions = list(old.regions)
    for at, first, step, count in find_progressions(numbers):
        # Indices that follow one another are written at once.
        many = count if step == 1 else 1
        for i in range(0, count, many):
            number = first + i * step
            start = (0,) * dim + (number,) + (0,) * (len(old.shape) - dim - 1)
            stop = (*old.shape[:dim], number + many, *old.shape[dim + 1 :])
            regions = [part for region in regions for part in cut_away(region, start, stop)]
            slab = written.narrowed(dim, at + i, at + i + many)
            regions += (
                TensorRegion(_add(region.start, start), _add(region.stop, start), region.origin)
                for region in slab.regions
            )
    return RegionMap(old.shape, tuple(regions))


def _add(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _find_value(memories: Memories, value: Any) -> float | None:
    """A number, or that of a tensor that has one and is made of no source."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        return None
    (origin,) = memories.read(value).origins
    if isinstance(origin, Filled):
        return origin.value
    return float(value.detach().item()) if is_known(memories, value) else None


def is_known(memories: Memories, tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that come from no source."""
    if tensor.device.type == "meta":
        return False
    origins = memories.read(tensor).origins
    return not any(isinstance(o, Taken) or (isinstance(o, Made) and o.sources) for o in origins)


def known_numbers(memories: Memories, index: torch.Tensor) -> list[int] | None:
    """The numbers of an index of one dimension, or the places where a mask is true."""
    if index.dim() > 1 or not is_known(memories, index):
        return None
    index = index.detach().reshape(-1)
    numbers = index.nonzero().reshape(-1) if index.dtype == torch.bool else index
    found: list[int] = numbers.tolist()
    return found


def find_single_index(
    memories: Memories, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[int, list[int]] | None:
    """The dimension and the numbers, where a tensor is indexed along one dimension only."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1:
        return None
    dim, index = given[0]
    numbers = known_numbers(memories, index)
    if numbers is None:
        return None
    return dim, [number % tensor.shape[dim] for number in numbers]


def _number_elements(
    memories: Memories, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> Any:
    """The numbers of a tensor's elements, to be indexed as it is; None where that cannot be."""
    known = all(index is None or is_known(memories, index) for index in indices)
    if not known or tensor.numel() > MOST_ELEMENTS:
        return None
    return torch.arange(tensor.numel()).reshape(tensor.shape)


def _take_elements(memories: Memories, tensor: torch.Tensor, places: torch.Tensor) -> RegionMap:
    """The elements of a tensor at row-major numbers, in boxes."""
    found = memories.read(tensor)
    shape = tuple(places.shape)
    # For each element the region that it lies in, and where that region's source has it.
    number = torch.full(found.shape, -1, dtype=torch.int64)
    offset = torch.zeros(found.shape, dtype=torch.int64)
    for i, (start, stop, origin) in enumerate(found.regions):
        inside = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        number[inside] = i
        if isinstance(origin, Taken):
            own = torch.full(number[inside].shape, origin.offset, dtype=torch.int64)
            for d, stride in enumerate(origin.strides):
                steps = torch.arange(own.shape[d]) * stride
                own += steps.reshape((-1,) + (1,) * (own.dim() - d - 1))
            offset[inside] = own
    flat = places.reshape(-1)
    numbers = number.reshape(-1)[flat].reshape(shape).numpy()
    offsets = offset.reshape(-1)[flat].reshape(shape).numpy()
    # Elements of equal origins, wherever they lay, are in boxes together.
    same: dict[object, int] = {}
    groups = {-1: -1}
    origins: list[Origin] = []
    for i, region in enumerate(found.regions):
        origin = region.origin
        key = (origin.source, origin.steps) if isinstance(origin, Taken) else repr(origin)
        groups[i] = same.setdefault(key, len(origins))
        if groups[i] == len(origins):
            origins.append(origin)
    table = torch.tensor([groups[i] for i in range(-1, len(found.regions))])
    kinds = table[torch.from_numpy(numbers) + 1].numpy()
    regions = []
    for start, stop, (kind,), (first,), steps in find_boxes([offsets], [kinds]):
        if kind >= 0:
            origin = origins[kind]
            if isinstance(origin, Taken):
                origin = origin._replace(offset=first, strides=tuple(step for (step,) in steps))
            regions.append(TensorRegion(start, stop, origin))
    return RegionMap(shape, tuple(regions))


def apply_elementwise(
    memories: Memories, name: str, result: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> RegionMap | None:
    """The map of an operation that works on each element of one tensor by itself."""
    own = [one for one in tensors if not is_known(memories, one) or one.device.type == "meta"]
    if len(own) != 1 or any(one.numel() != 1 for one in tensors if one is not own[0]):
        return None

    def change(origin: Origin) -> Origin:
        if isinstance(origin, Taken):
            return origin._replace(steps=(*origin.steps, name))
        return joined_origin(name, [origin])

    return memories.read(own[0]).broadcast(result.shape).changed(change)


_aten = torch.ops.aten

# Operators that make a new tensor of elements of others, or of one value.
NEW: dict[Any, Operator] = {
    _aten.clone.default: _copy_whole,
    _aten._to_copy.default: _copy_whole,
    _aten.lift_fresh_copy.default: _copy_whole,
    _aten.cat.default: _concatenate,
    _aten.stack.default: _stack,
    _aten.repeat.default: _repeat,
    _aten.constant_pad_nd.default: _pad,
    _aten.flip.default: _flip,
    _aten.roll.default: _roll,
    _aten.index_select.default: _select_indices,
    _aten.index.Tensor: _index,
    _aten.gather.default: _gather,
    _aten.take.default: _take,
    _aten.where.self: _choose,
    _aten.masked_fill.Scalar: _fill_masked,
    _aten.masked_fill.Tensor: _fill_masked,
    _aten.zeros.default: _constant(0.0),
    _aten.zeros_like.default: _constant(0.0),
    _aten.new_zeros.default: _constant(0.0),
    _aten.ones.default: _constant(1.0),
    _aten.ones_like.default: _constant(1.0),
    _aten.new_ones.default: _constant(1.0),
    _aten.full.default: _full,
    _aten.full_like.default: _full,
    _aten.new_full.default: lambda memories, result, tensor, shape, value, **_: _scalar(
        memories, result, value
    ),
    _aten.scalar_tensor.default: _scalar,
    _aten.empty.memory_format: _nothing,
    _aten.empty_strided.default: _nothing,
    _aten.empty_like.default: _nothing,
    _aten.new_empty.default: _nothing,
    _aten.new_empty_strided.default: _nothing,
    # As the in-place ones, of a copy.
    _aten.copy.default: _copy_into,
    _aten.index_copy.default: _copy_to_indices,
    _aten.index_put.default: _put,
    _aten.index_fill.int_Scalar: _fill_indices,
    _aten.fill.Scalar: _fill,
    _aten.fill.Tensor: _fill,
}

# Operators that make a tensor of nothing: its values are known without it.
FACTORIES = {
    _aten.zeros.default,
    _aten.ones.default,
    _aten.full.default,
    _aten.empty.memory_format,
    _aten.empty_strided.default,
}

# Operators that write to their first argument.
WRITING: dict[Any, Operator] = {
    _aten.copy_.default: _copy_into,
    _aten.fill_.Scalar: _fill,
    _aten.fill_.Tensor: _fill,
    _aten.zero_.default: lambda memories, result, tensor: RegionMap.of(tensor.shape, Filled(0.0)),
    _aten.index_copy_.default: _copy_to_indices,
    _aten.index_fill_.int_Scalar: _fill_indices,
    _aten.index_put_.default: _put,
    _aten._index_put_impl_.default: _put,
    _aten.masked_fill_.Scalar: _fill_masked,
    _aten.masked_fill_.Tensor: _fill_masked,
}

# Operators that answer with values, or with as many elements as values say.
VALUES = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.is_nonzero.default,
    _aten.bincount.default,
    _aten.repeat_interleave.Tensor,
}
