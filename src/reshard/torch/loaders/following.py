"""A loader's operators, followed while it runs.

PyTorch tells a dispatch mode of every operator, after views were made of reshapes and the like.
Tensors of one memory are known by their storage: a view needs no note, since its offset and strides
say which part of the memory it is.

1. Each source is a memory whose elements are its own.
2. An operator that moves elements writes their origins to the memory of its result
   (`operators`). What any other operator makes is named by it.
3. At the end a parameter is read from whatever memory it has by then.

Tensors without values (`meta`) are followed as well as others, in no time and no memory. There an
operator that asks for a value cannot be answered, and the run ends with `ValuesNeeded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.dtypes import dtype as as_dtype
from reshard.errors import RunError
from reshard.torch.loaders.operators import FACTORIES, NEW, VALUES, WRITING, apply_elementwise
from reshard.torch.loaders.origins import (
    Filled,
    Made,
    Origin,
    Taken,
    joined_origin,
    with_bits,
    with_cast,
)
from reshard.torch.loaders.region_map import RegionMap
from reshard.torch.loaders.storage_map import StorageMap
from reshard.torch.loaders.strided_overlap import StridedRegion

# What a loader brought along.
_UNKNOWN = Made(("a tensor of the loader",), ())


class ValuesNeeded(RunError):
    """A loader that looks at values, followed with tensors that have none."""


class FollowedOperators(TorchDispatchMode):  # type: ignore[misc]
    """The memories of a loader's tensors, and what is in them.

    Args:
        sources: the tensors that the loader is given, by name.
        carried: the types of the sources, where their values are numbers of elements. No narrower
            type than float32 can hold these, so nothing is cast to one.
    """

    def __init__(
        self, sources: dict[str, torch.Tensor], carried: Sequence[torch.dtype] | None = None
    ) -> None:
        super().__init__()
        self.carries_values = carried is not None
        # The types that tensors of a memory would have.
        self.types: dict[int, torch.dtype] = {}
        self.names = list(sources)
        self.dtypes = [as_dtype(tensor.dtype).name for tensor in sources.values()]
        self.memories: dict[int, tuple[StorageWeakRef, StorageMap]] = {}
        self.values_of: dict[str, None] = {}
        self.written_sources: dict[str, None] = {}
        self.target_types: dict[str, torch.dtype] = {}
        for number, tensor in enumerate(sources.values()):
            self._register(tensor, number)
            if carried is not None:
                self.types[tensor.untyped_storage()._cdata] = carried[number]

    def _register(self, tensor: torch.Tensor, source: int | None = None) -> StorageMap:
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.dtype.itemsize
        memory = StorageMap(str(tensor.dtype).removeprefix("torch."), size, source)
        # While the reference lives the address is not given to another storage.
        self.memories[storage._cdata] = (StorageWeakRef(storage), memory)
        return memory

    def _find(self, tensor: torch.Tensor) -> StorageMap | None:
        found = self.memories.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def register_target(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """A tensor that nothing has been written to yet, and the type that it would have."""
        if self._find(tensor) is None:
            self._register(tensor)
            self.types[tensor.untyped_storage()._cdata] = dtype

    def type_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The type that a tensor would have if it did not carry numbers of elements."""
        if not self.carries_values:
            return tensor.dtype
        return self.types.get(tensor.untyped_storage()._cdata, tensor.dtype)

    # What operators ask for.

    def read(self, tensor: torch.Tensor) -> RegionMap:
        """What a tensor has."""
        memory = self._find(tensor)
        if memory is None:
            # Made before, or behind the back of the mode.
            origin: Origin = _UNKNOWN
            if tensor.device.type != "meta" and tensor.numel() == 1:
                origin = Filled(float(tensor.detach().reshape(()).item()))
            return RegionMap.of(tensor.shape, origin)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if memory.dtype == dtype:
            return memory.read(_region(tensor))
        if as_dtype(memory.dtype).itemsize_bytes == tensor.dtype.itemsize:
            found = memory.read(_region(tensor))
            return found.changed(lambda origin: self._as_bits(origin, memory.dtype, dtype))
        whole = memory.read(StridedRegion(0, (memory.size,), (1,)))
        return RegionMap.of(tensor.shape, joined_origin(f"bits as {dtype}", whole.origins))

    def write(self, tensor: torch.Tensor, written: RegionMap) -> None:
        """Write to the memory of a tensor what has its shape."""
        memory = self._find(tensor)
        if memory is None:
            memory = self._register(tensor)
            memory.write_all(_UNKNOWN)
        if memory.source is not None:
            self.written_sources.setdefault(self.names[memory.source])
        dtype = str(tensor.dtype).removeprefix("torch.")
        if memory.dtype == dtype:
            memory.write(_region(tensor), written)
        elif as_dtype(memory.dtype).itemsize_bytes == tensor.dtype.itemsize:
            as_memory = written.changed(lambda o: self._as_bits(o, dtype, memory.dtype))
            memory.write(_region(tensor), as_memory)
        else:
            before = memory.read(StridedRegion(0, (memory.size,), (1,)))
            memory.write_all(
                joined_origin(f"bits as {memory.dtype}", [*before.origins, *written.origins])
            )

    def cast(self, given: RegionMap, dtype: torch.dtype, to: torch.dtype) -> RegionMap:
        """Elements of one type as another."""
        if dtype == to:
            return given
        name = str(to).removeprefix("torch.")

        def change(origin: Origin) -> Origin:
            if isinstance(origin, Taken):
                steps = with_cast(origin.steps, self.dtypes[origin.source], name)
                return origin._replace(steps=steps)
            return origin

        return given.changed(change)

    def note_read(self, origins: Sequence[Origin | None]) -> None:
        """Say that the values of elements were looked at."""
        for origin in origins:
            numbers = (
                (origin.source,)
                if isinstance(origin, Taken)
                else origin.sources
                if isinstance(origin, Made)
                else ()
            )
            for number in numbers:
                self.values_of.setdefault(self.names[number])

    def _as_bits(self, origin: Origin, dtype: str, to: str) -> Origin:
        if isinstance(origin, Taken):
            steps = with_bits(origin.steps, self.dtypes[origin.source], to)
            return origin._replace(steps=steps)
        return origin if dtype == to else joined_origin(f"bits as {to}", [origin])

    # The mode.

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_list_tensors((args, kwargs)))
        asked = kwargs.get("dtype")
        if self.carries_values and asked is not None:
            kwargs = {**kwargs, "dtype": carrier_of(asked)}
        if function in VALUES:
            self._look_at_values(function, tensors)
        result = self._run(function, args, kwargs, tensors)
        if function in WRITING:
            self._follow_write(function, args, kwargs, tensors)
            return result
        made = [one for one in _list_tensors(result) if self._find(one) is None]
        inputs = {one.untyped_storage()._cdata for one in tensors}
        # What shares the memory of an argument is a view of it.
        made = [one for one in made if one.untyped_storage()._cdata not in inputs]
        if made:
            if self.carries_values:
                self._note_types(asked, tensors, made)
            self._follow_new(function, args, kwargs, tensors, made)
        if function._schema.is_mutable:
            self._follow_mutation(function, args, kwargs, tensors)
        return result

    def _note_types(
        self, asked: torch.dtype | None, tensors: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """The types that results would have: what was asked for, or that of an argument."""
        types = [*([] if asked is None else [asked]), *(self.type_of(one) for one in tensors)]
        for one in made:
            fitting = (kind for kind in types if carrier_of(kind) == one.dtype)
            self.types[one.untyped_storage()._cdata] = next(fitting, one.dtype)

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> Any:
        """The operator's result; on `meta` where one of its tensors is there."""
        if function in FACTORIES and not self.carries_values:
            # Numbers of indices are needed; room for what is loaded is not.
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point:
                return function(*args, **{**kwargs, "device": torch.device("meta")})
        is_meta = [one.device.type == "meta" for one in tensors]
        if not any(is_meta):
            return function(*args, **kwargs)
        if "device" in kwargs and kwargs["device"] is not None:
            # To another device: there are no values to send.
            kwargs = {**kwargs, "device": torch.device("meta")}
        if all(is_meta):
            return function(*args, **kwargs)
        if function not in (torch.ops.aten.copy_.default,):
            try:
                return function(*args, **kwargs)
            except (RuntimeError, NotImplementedError):
                pass
        # Values beside tensors that have none: only shapes are computed.
        results = function(*_to_meta(args), **_to_meta(kwargs))
        is_in_place = function._schema.is_mutable
        return args[0] if is_in_place else results

    def _look_at_values(self, function: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.note_read(self.read(tensor).origins)
            if tensor.device.type == "meta":
                raise ValuesNeeded(
                    f"{_name(function)} of a tensor of shape {list(tensor.shape)} asks for values"
                )

    def _follow_write(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> None:
        target = args[0]
        # Nothing to tell of tensors that have nothing to do with sources or targets.
        if all(self._find(one) is None for one in tensors):
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
        made: list[torch.Tensor],
    ) -> None:
        for result in made:
            self._register(result)
            found = None
            if function in NEW and len(made) == 1:
                found = NEW[function](self, result, *args, **kwargs)
            elif torch.Tag.pointwise in function.tags:
                name = _name(function) + _numbers_text(args, kwargs)
                found = apply_elementwise(self, name, result, tensors)
            if found is None:
                found = self._name_made(function, result, tensors)
            self.write(result, found)

    def _follow_mutation(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> None:
        """What an operator that is not known writes to its arguments."""
        named = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}
        named |= kwargs
        for argument in function._schema.arguments:
            alias, value = argument.alias_info, named.get(argument.name)
            if alias is None or not alias.is_write:
                continue
            for tensor in _list_tensors(value):
                found = None
                if torch.Tag.pointwise in function.tags:
                    name = _name(function).rstrip("_") + _numbers_text(args, kwargs)
                    found = apply_elementwise(self, name, tensor, tensors)
                self.write(tensor, found or self._name_made(function, tensor, tensors))

    def _name_made(
        self, function: Any, result: torch.Tensor, tensors: list[torch.Tensor]
    ) -> RegionMap:
        """A result that an operator has made of all elements of its tensors."""
        origins = [origin for tensor in tensors for origin in self.read(tensor).origins]
        return RegionMap.of(result.shape, joined_origin(_name(function), origins))


def carrier_of(dtype: torch.dtype | None) -> torch.dtype | None:
    """The type that holds numbers of elements in the place of `dtype`."""
    if dtype is None or dtype == torch.bool:
        return dtype
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return dtype if dtype.is_complex or dtype == torch.int64 else torch.int32


def _region(tensor: torch.Tensor) -> StridedRegion:
    return StridedRegion(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _name(function: Any) -> str:
    name: str = function.overloadpacket.__name__
    return name


def _numbers_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The numbers that an operation was given, such as the 1 of `add(1)`."""
    numbers = [one for one in args if isinstance(one, int | float) and not isinstance(one, bool)]
    numbers += [
        float(one.item())
        for one in args
        if isinstance(one, torch.Tensor) and one.dim() == 0 and one.device.type != "meta"
    ]
    texts = [f"{one:g}" for one in numbers]
    texts += [f"{key}={one:g}" for key, one in kwargs.items() if type(one) in (int, float)]
    return f"({', '.join(texts)})" if texts else ""


def _list_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _list_tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _list_tensors(one)


def _to_meta(value: Any) -> Any:
    """Arguments with every tensor's shape and strides, and no values."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(one) for one in value)
    if isinstance(value, dict):
        return {key: _to_meta(one) for key, one in value.items()}
    return value
