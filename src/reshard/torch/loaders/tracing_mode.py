"""A dispatch mode that traces a loader's operators.

PyTorch calls a dispatch mode for every operator, after composite operators were decomposed. Tensors
of a storage are identified by it: a view needs no record, since its offset and strides locate it
in the storage.

1. Each source is a storage whose elements are its own.
2. An operator that moves elements writes their origins to the storage of its result (`NEW`,
   `WRITING`). The result of any other operator is computed, and named by the operator.
3. At the end a parameter is read from the storage that it has by then.

Tensors without values (`meta`) need neither time nor memory. An operator that needs their values
raises `ValuesNeeded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.dtypes import dtype as as_dtype
from reshard.errors import RunError
from reshard.geometry.regions import Region
from reshard.geometry.strided_overlap import find_regions
from reshard.torch.loaders import region_map

# The origin of a tensor that the loader created before it ran.
_UNKNOWN = region_map.ComputedFrom(("a tensor of the loader",), ())


class ValuesNeeded(RunError):
    """A loader that reads values, run with tensors that have none."""


class TracingMode(TorchDispatchMode):  # type: ignore[misc]
    """The storages of a loader's tensors and their contents.

    Args:
        sources: the tensors passed to the loader, by name.
        carried: the dtypes of the sources if their values are element numbers. Types narrower than
            float32 cannot hold these, so nothing is cast to one.
    """

    def __init__(
        self, sources: dict[str, torch.Tensor], carried: Sequence[torch.dtype] | None = None
    ) -> None:
        super().__init__()
        self.carries_values = carried is not None
        # The dtypes that tensors of a storage would have without element numbers.
        self.types: dict[int, torch.dtype] = {}
        self.names = list(sources)
        self.dtypes = [as_dtype(tensor.dtype).name for tensor in sources.values()]
        self.memories: dict[int, tuple[StorageWeakRef, region_map.StorageMap]] = {}
        self.values_of: dict[str, None] = {}
        self.written_sources: dict[str, None] = {}
        self.target_types: dict[str, torch.dtype] = {}
        for number, tensor in enumerate(sources.values()):
            self._register(tensor, number)
            if carried is not None:
                self.types[tensor.untyped_storage()._cdata] = carried[number]

    def _register(self, tensor: torch.Tensor, source: int | None = None) -> region_map.StorageMap:
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.dtype.itemsize
        memory = region_map.StorageMap(str(tensor.dtype).removeprefix("torch."), size, source)
        # The reference keeps another storage from reusing the address.
        self.memories[storage._cdata] = (StorageWeakRef(storage), memory)
        return memory

    def _find(self, tensor: torch.Tensor) -> region_map.StorageMap | None:
        entry = self.memories.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def register_target(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Register a tensor that is not written yet, with its dtype without element numbers."""
        if self._find(tensor) is None:
            self._register(tensor)
            self.types[tensor.untyped_storage()._cdata] = dtype

    def type_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that a tensor would have if it did not carry element numbers."""
        if not self.carries_values:
            return tensor.dtype
        return self.types.get(tensor.untyped_storage()._cdata, tensor.dtype)

    def read(self, tensor: torch.Tensor) -> region_map.RegionMap:
        """Return the contents of a tensor."""
        memory = self._find(tensor)
        if memory is None:
            # Created before the run, or without the dispatcher.
            origin: region_map.Origin = _UNKNOWN
            if tensor.device.type != "meta" and tensor.numel() == 1:
                origin = region_map.FilledWith(float(tensor.detach().reshape(()).item()))
            return region_map.RegionMap.of(tensor.shape, origin)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if memory.dtype == dtype:
            return memory.read(_view(tensor))
        if as_dtype(memory.dtype).itemsize_bytes == tensor.dtype.itemsize:
            contents = memory.read(_view(tensor))
            return contents.map_origins(lambda origin: self._as_bits(origin, memory.dtype, dtype))
        whole = memory.read(Region.dense((memory.size,), None))
        return region_map.RegionMap.of(
            tensor.shape, region_map.combine_origins(f"bits as {dtype}", whole.origins)
        )

    def write(self, tensor: torch.Tensor, written: region_map.RegionMap) -> None:
        """Write contents of the tensor's shape to its storage."""
        memory = self._find(tensor)
        if memory is None:
            memory = self._register(tensor)
            memory.write_all(_UNKNOWN)
        if memory.source is not None:
            self.written_sources.setdefault(self.names[memory.source])
        dtype = str(tensor.dtype).removeprefix("torch.")
        if memory.dtype == dtype:
            memory.write(_view(tensor), written)
        elif as_dtype(memory.dtype).itemsize_bytes == tensor.dtype.itemsize:
            as_memory = written.map_origins(lambda o: self._as_bits(o, dtype, memory.dtype))
            memory.write(_view(tensor), as_memory)
        else:
            before = memory.read(Region.dense((memory.size,), None))
            memory.write_all(
                region_map.combine_origins(
                    f"bits as {memory.dtype}", [*before.origins, *written.origins]
                )
            )

    def cast(
        self, contents: region_map.RegionMap, dtype: torch.dtype, to: torch.dtype
    ) -> region_map.RegionMap:
        """Return elements cast to another dtype."""
        if dtype == to:
            return contents
        name = str(to).removeprefix("torch.")

        def change(origin: region_map.Origin) -> region_map.Origin:
            if isinstance(origin, region_map.CopyOf):
                steps = region_map.add_cast(origin.steps, self.dtypes[origin.source], name)
                return origin._replace(steps=steps)
            return origin

        return contents.map_origins(change)

    def _as_bits(self, origin: region_map.Origin, dtype: str, to: str) -> region_map.Origin:
        if isinstance(origin, region_map.CopyOf):
            steps = region_map.add_bitcast(origin.steps, self.dtypes[origin.source], to)
            return origin._replace(steps=steps)
        return origin if dtype == to else region_map.combine_origins(f"bits as {to}", [origin])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_list_tensors((args, kwargs)))
        dtype = kwargs.get("dtype")
        if self.carries_values and dtype is not None:
            kwargs = {**kwargs, "dtype": carrier_dtype(dtype)}
        if function in VALUES:
            self._look_at_values(function, tensors)
        result = self._run(function, args, kwargs, tensors)
        if function in WRITING:
            self._follow_write(function, args, kwargs, tensors)
            return result
        outputs = [tensor for tensor in _list_tensors(result) if self._find(tensor) is None]
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
        # A result that shares the storage of an argument is a view of it.
        outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in inputs]
        if outputs:
            if self.carries_values:
                self._note_types(dtype, tensors, outputs)
            self._follow_new(function, args, kwargs, tensors, outputs)
        if function._schema.is_mutable:
            self._follow_mutation(function, args, kwargs, tensors)
        return result

    def _note_types(
        self, dtype: torch.dtype | None, tensors: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Record the dtypes of results: the dtype argument, or that of an operand."""
        types = [*([] if dtype is None else [dtype]), *(self.type_of(tensor) for tensor in tensors)]
        for tensor in outputs:
            fitting = (kind for kind in types if carrier_dtype(kind) == tensor.dtype)
            self.types[tensor.untyped_storage()._cdata] = next(fitting, tensor.dtype)

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> Any:
        """Return the operator's result, on `meta` if an operand is there."""
        if function in FACTORIES and not self.carries_values:
            # The values of index tensors are needed; memory for weights is not.
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point:
                return function(*args, **{**kwargs, "device": torch.device("meta")})
        is_meta = [tensor.device.type == "meta" for tensor in tensors]
        if not any(is_meta):
            return function(*args, **kwargs)
        if "device" in kwargs and kwargs["device"] is not None:
            # There are no values to send to another device.
            kwargs = {**kwargs, "device": torch.device("meta")}
        if all(is_meta):
            return function(*args, **kwargs)
        if function not in (torch.ops.aten.copy_.default,):
            try:
                return function(*args, **kwargs)
            except (RuntimeError, NotImplementedError):
                pass
        # With and without values together, only shapes are computed.
        results = function(*_to_meta(args), **_to_meta(kwargs))
        is_in_place = function._schema.is_mutable
        return args[0] if is_in_place else results

    def _look_at_values(self, function: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            for origin in self.read(tensor).origins:
                for number in region_map.combine_origins(_name(function), [origin]).sources:
                    self.values_of.setdefault(self.names[number])
            if tensor.device.type == "meta":
                raise ValuesNeeded(
                    f"{_name(function)} of a tensor of shape {list(tensor.shape)} asks for values"
                )

    def _follow_write(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> None:
        target = args[0]
        # Tensors that are neither sources nor targets need no record.
        if all(self._find(tensor) is None for tensor in tensors):
            return
        written = WRITING[function](self, target, *args, **kwargs)
        if written is None:
            written = self._name_made(function, target, tensors)
        self.write(target, written)

    def _follow_new(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        for result in outputs:
            self._register(result)
            contents = None
            if function in NEW and len(outputs) == 1:
                contents = NEW[function](self, result, *args, **kwargs)
            elif torch.Tag.pointwise in function.tags:
                name = _name(function) + _numbers_text(args, kwargs)
                contents = apply_elementwise(self, name, result, tensors)
            if contents is None:
                contents = self._name_made(function, result, tensors)
            self.write(result, contents)

    def _follow_mutation(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> None:
        """Record what an unknown operator writes to its arguments."""
        named = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}
        named |= kwargs
        for argument in function._schema.arguments:
            alias, value = argument.alias_info, named.get(argument.name)
            if alias is None or not alias.is_write:
                continue
            for tensor in _list_tensors(value):
                contents = None
                if torch.Tag.pointwise in function.tags:
                    name = _name(function).rstrip("_") + _numbers_text(args, kwargs)
                    contents = apply_elementwise(self, name, tensor, tensors)
                self.write(tensor, contents or self._name_made(function, tensor, tensors))

    def _name_made(
        self, function: Any, result: torch.Tensor, tensors: list[torch.Tensor]
    ) -> region_map.RegionMap:
        """Return the origin of a result that an operator computed from all elements."""
        origins = [origin for tensor in tensors for origin in self.read(tensor).origins]
        return region_map.RegionMap.of(
            result.shape, region_map.combine_origins(_name(function), origins)
        )


def carrier_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that holds element numbers in place of `dtype`."""
    if dtype is None or dtype == torch.bool:
        return dtype
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return dtype if dtype.is_complex or dtype == torch.int64 else torch.int32


def _view(tensor: torch.Tensor) -> Region:
    """Return a tensor as a region of its storage."""
    shape = tuple(tensor.shape)
    return Region((0,) * len(shape), shape, None, tensor.storage_offset(), tensor.stride())


def _name(function: Any) -> str:
    name: str = function.overloadpacket.__name__
    return name


def _numbers_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the numbers among the arguments as text, such as the 1 of `add(1)`."""
    numbers = [
        value for value in args if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    numbers += [
        float(value.item())
        for value in args
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "meta"
    ]
    texts = [f"{value:g}" for value in numbers]
    texts += [f"{key}={value:g}" for key, value in kwargs.items() if type(value) in (int, float)]
    return f"({', '.join(texts)})" if texts else ""


def _list_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _list_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _list_tensors(item)


def _to_meta(value: Any) -> Any:
    """Return arguments with tensors of the same shapes and strides, without values."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return value


# The most elements that masks and indices along several dimensions may have.
MAX_ELEMENTS = 1 << 22


Operator = Callable[..., region_map.RegionMap | None]


def _copy_whole(
    mode: TracingMode, result: Any, tensor: torch.Tensor, *_: Any, **__: Any
) -> region_map.RegionMap:
    return mode.cast(mode.read(tensor), tensor.dtype, result.dtype)


def _concatenate(
    mode: TracingMode, result: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> region_map.RegionMap:
    # Empty 1-D tensors concatenate with any others.
    parts = [part for part in tensors if part.shape != (0,) or result.shape == (0,)]
    maps = [mode.cast(mode.read(part), part.dtype, result.dtype) for part in parts]
    return region_map.concatenate(maps, dim % max(result.dim(), 1))


def _stack(
    mode: TracingMode, result: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> region_map.RegionMap:
    dim %= result.dim()
    maps = [mode.cast(mode.read(part), part.dtype, result.dtype) for part in tensors]
    return region_map.concatenate([part.unsqueeze(dim) for part in maps], dim)


def _repeat(mode: TracingMode, result: Any, tensor: torch.Tensor, repeats: Sequence[int]) -> Any:
    return mode.read(tensor).tile(repeats)


def _pad(
    mode: TracingMode, result: Any, tensor: torch.Tensor, pad: Sequence[int], value: float = 0
) -> region_map.RegionMap:
    # Pairs from the last dimension to the first.
    before, after = [0] * tensor.dim(), [0] * tensor.dim()
    for i in range(len(pad) // 2):
        before[-1 - i], after[-1 - i] = pad[2 * i], pad[2 * i + 1]
    return mode.read(tensor).pad(before, after, value)


def _flip(
    mode: TracingMode, result: Any, tensor: torch.Tensor, dims: Sequence[int]
) -> region_map.RegionMap:
    contents = mode.read(tensor)
    for dim in dims:
        size = tensor.shape[dim]
        contents = contents.take(dim % tensor.dim(), range(size - 1, -1, -1))
    return contents


def _roll(
    mode: TracingMode,
    result: Any,
    tensor: torch.Tensor,
    shifts: Sequence[int],
    dims: Sequence[int] = (),
) -> region_map.RegionMap | None:
    if len(shifts) != len(dims):
        return None
    contents = mode.read(tensor)
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.shape[dim]
        contents = contents.take(dim % tensor.dim(), [(i - shift) % size for i in range(size)])
    return contents


def _select_indices(
    mode: TracingMode, result: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor
) -> region_map.RegionMap | None:
    numbers = known_numbers(mode, index)
    if numbers is None or not tensor.dim():
        return None
    return mode.read(tensor).take(dim % tensor.dim(), numbers)


def _index(
    mode: TracingMode, result: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> region_map.RegionMap | None:
    at = find_single_index(mode, tensor, indices)
    if at is not None:
        return mode.read(tensor).take(*at)
    places = _number_elements(mode, tensor, indices)
    return None if places is None else _take_elements(mode, tensor, places[tuple(indices)])


def _gather(
    mode: TracingMode, result: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor, **_: Any
) -> region_map.RegionMap | None:
    places = _number_elements(mode, tensor, [index])
    return None if places is None else _take_elements(mode, tensor, places.gather(dim, index))


def _take(
    mode: TracingMode, result: Any, tensor: torch.Tensor, index: torch.Tensor
) -> region_map.RegionMap | None:
    places = _number_elements(mode, tensor, [index])
    return None if places is None else _take_elements(mode, tensor, places.take(index))


def _choose(
    mode: TracingMode,
    result: Any,
    mask: torch.Tensor,
    if_true: torch.Tensor,
    if_false: torch.Tensor,
) -> region_map.RegionMap | None:
    if not is_known(mode, mask) or result.numel() > MAX_ELEMENTS:
        return None
    values = [
        mode.cast(mode.read(side), side.dtype, result.dtype).broadcast(result.shape)
        for side in (if_true, if_false)
    ]
    # Boxes with a constant mask.
    flags = mask.expand(result.shape).to(torch.int64).numpy()
    regions: list[Region] = []
    for start, stop, (flag,), _, _ in find_regions(np.zeros_like(flags), flags):
        part = values[1 - flag].crop(start, stop)
        regions += (region.translate(start) for region in part.regions)
    return region_map.RegionMap(tuple(result.shape), tuple(regions))


def _fill_masked(
    mode: TracingMode, result: Any, tensor: torch.Tensor, mask: torch.Tensor, value: Any
) -> region_map.RegionMap | None:
    number = _find_value(mode, value)
    if number is None:
        return None
    return _choose(mode, result, mask, torch.tensor(number, dtype=tensor.dtype), tensor)


def _constant(value: float) -> Operator:
    def fill(mode: TracingMode, result: Any, *_: Any, **__: Any) -> region_map.RegionMap:
        return region_map.RegionMap.of(result.shape, region_map.FilledWith(value))

    return fill


def _full(mode: TracingMode, result: Any, *args: Any, **_: Any) -> region_map.RegionMap:
    # The value follows the shape or the tensor, or both.
    return region_map.RegionMap.of(result.shape, region_map.FilledWith(float(args[-1])))


def _nothing(mode: TracingMode, result: Any, *_: Any, **__: Any) -> region_map.RegionMap:
    return region_map.RegionMap.of(result.shape, None)


# Operators that write to their first argument return its whole new contents.


def _copy_into(
    mode: TracingMode, result: Any, tensor: torch.Tensor, source: torch.Tensor, *_: Any
) -> region_map.RegionMap:
    written = mode.cast(mode.read(source), source.dtype, tensor.dtype)
    return written.broadcast(tensor.shape)


def _fill(mode: TracingMode, result: Any, tensor: torch.Tensor, value: Any) -> region_map.RegionMap:
    number = _find_value(mode, value)
    if number is not None:
        return region_map.RegionMap.of(tensor.shape, region_map.FilledWith(number))
    return mode.cast(mode.read(value), value.dtype, tensor.dtype).broadcast(tensor.shape)


def _copy_to_indices(
    mode: TracingMode,
    result: Any,
    tensor: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
) -> region_map.RegionMap | None:
    numbers = known_numbers(mode, index)
    if numbers is None or not tensor.dim():
        return None
    dim %= tensor.dim()
    return write_at(mode.read(tensor), dim, numbers, mode.read(source))


def _fill_indices(
    mode: TracingMode,
    result: Any,
    tensor: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    value: Any,
) -> region_map.RegionMap | None:
    numbers, number = known_numbers(mode, index), _find_value(mode, value)
    if numbers is None or number is None or not tensor.dim():
        return None
    dim %= tensor.dim()
    shape = (*tensor.shape[:dim], len(numbers), *tensor.shape[dim + 1 :])
    return write_at(
        mode.read(tensor),
        dim,
        numbers,
        region_map.RegionMap.of(shape, region_map.FilledWith(number)),
    )


def _put(
    mode: TracingMode,
    result: Any,
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    *_: Any,
) -> region_map.RegionMap | None:
    at = None if accumulate else find_single_index(mode, tensor, indices)
    if at is None:
        return None
    dim, numbers = at
    shape = (*tensor.shape[:dim], len(numbers), *tensor.shape[dim + 1 :])
    written = mode.cast(mode.read(values), values.dtype, tensor.dtype).broadcast(shape)
    return write_at(mode.read(tensor), dim, numbers, written)


def write_at(
    old: region_map.RegionMap, dim: int, numbers: Sequence[int], written: region_map.RegionMap
) -> region_map.RegionMap:
    """Write a map to indices of a dimension of another; the last of equal indices counts."""
    regions = list(old.regions)
    for at, first, step, count in region_map.find_progressions(numbers):
        # Consecutive indices are written at once.
        many = count if step == 1 else 1
        for i in range(0, count, many):
            number = first + i * step
            start = (0,) * dim + (number,) + (0,) * (len(old.shape) - dim - 1)
            stop = (*old.shape[:dim], number + many, *old.shape[dim + 1 :])
            regions = [part for region in regions for part in region.subtract(start, stop)]
            slab = written.narrow(dim, at + i, at + i + many)
            regions += (region.translate(start) for region in slab.regions)
    return region_map.RegionMap(old.shape, tuple(regions))


def _find_value(mode: TracingMode, value: Any) -> float | None:
    """Return a number, or the value of a scalar tensor that depends on no source."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        return None
    (origin,) = mode.read(value).origins
    if isinstance(origin, region_map.FilledWith):
        return origin.value
    return float(value.detach().item()) if is_known(mode, value) else None


def is_known(mode: TracingMode, tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values that depend on no source."""
    if tensor.device.type == "meta":
        return False
    origins = mode.read(tensor).origins
    return not any(
        isinstance(o, region_map.CopyOf) or (isinstance(o, region_map.ComputedFrom) and o.sources)
        for o in origins
    )


def known_numbers(mode: TracingMode, index: torch.Tensor) -> list[int] | None:
    """Return the numbers of a 1-D index, or the positions where a mask is true."""
    if index.dim() > 1 or not is_known(mode, index):
        return None
    index = index.detach().reshape(-1)
    numbers = index.nonzero().reshape(-1) if index.dtype == torch.bool else index
    result: list[int] = numbers.tolist()
    return result


def find_single_index(
    mode: TracingMode, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[int, list[int]] | None:
    """Return dimension and numbers if a tensor is indexed along a single dimension."""
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or indexed[0][1].dim() != 1:
        return None
    dim, index = indexed[0]
    numbers = known_numbers(mode, index)
    if numbers is None:
        return None
    return dim, [number % tensor.shape[dim] for number in numbers]


def _number_elements(
    mode: TracingMode, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> Any:
    """Return the row-major numbers of a tensor's elements, or None if indices are unknown."""
    are_known = all(index is None or is_known(mode, index) for index in indices)
    if not are_known or tensor.numel() > MAX_ELEMENTS:
        return None
    return torch.arange(tensor.numel()).reshape(tensor.shape)


def _take_elements(
    mode: TracingMode, tensor: torch.Tensor, elements: torch.Tensor
) -> region_map.RegionMap:
    """Return the elements of a tensor at row-major numbers, in boxes."""
    contents = mode.read(tensor)
    # The origin of each element, by number, and its offset in a source.
    numbers: dict[region_map.Origin, int] = {}
    number = np.full(contents.shape, -1, dtype=np.int64)
    offset = np.zeros(contents.shape, dtype=np.int64)
    for region in contents.regions:
        inside = tuple(slice(a, b) for a, b in zip(*region.box, strict=True))
        number[inside] = numbers.setdefault(region.container, len(numbers))
        offset[inside] = region.positions
    taken, origins = elements.numpy(), list(numbers)
    return region_map.RegionMap(
        tuple(elements.shape),
        tuple(
            region._replace(container=origins[origin])
            for region in find_regions(offset.reshape(-1)[taken], number.reshape(-1)[taken])
            for (origin,) in [region.container]
            if origin >= 0
        ),
    )


def apply_elementwise(
    mode: TracingMode, name: str, result: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> region_map.RegionMap | None:
    """Return the map of an elementwise operation on a tensor."""
    unknown = [
        tensor for tensor in tensors if not is_known(mode, tensor) or tensor.device.type == "meta"
    ]
    if len(unknown) != 1 or any(
        tensor.numel() != 1 for tensor in tensors if tensor is not unknown[0]
    ):
        return None

    def change(origin: region_map.Origin) -> region_map.Origin:
        if isinstance(origin, region_map.CopyOf):
            return origin._replace(steps=(*origin.steps, name))
        return region_map.combine_origins(name, [origin])

    return mode.read(unknown[0]).broadcast(result.shape).map_origins(change)


_aten = torch.ops.aten

# Operators that create a tensor from elements of others, or from a constant.
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
    _aten.new_full.default: _full,
    _aten.scalar_tensor.default: _full,
    _aten.empty.memory_format: _nothing,
    _aten.empty_strided.default: _nothing,
    _aten.empty_like.default: _nothing,
    _aten.new_empty.default: _nothing,
    _aten.new_empty_strided.default: _nothing,
    # The functional forms of in-place operators.
    _aten.copy.default: _copy_into,
    _aten.index_copy.default: _copy_to_indices,
    _aten.index_put.default: _put,
    _aten.index_fill.int_Scalar: _fill_indices,
    _aten.fill.Scalar: _fill,
    _aten.fill.Tensor: _fill,
}

# Operators that create a tensor from no operands.
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
    _aten.zero_.default: _constant(0.0),
    _aten.index_copy_.default: _copy_to_indices,
    _aten.index_fill_.int_Scalar: _fill_indices,
    _aten.index_put_.default: _put,
    _aten._index_put_impl_.default: _put,
    _aten.masked_fill_.Scalar: _fill_masked,
    _aten.masked_fill_.Tensor: _fill_masked,
}

# Operators whose result depends on values, or whose result shape does.
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
