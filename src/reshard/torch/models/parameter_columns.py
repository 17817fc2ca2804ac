"""Tensors of a model as columns, with what many of them have in common stored once.

Tensors of many layers differ only in their memory addresses. A tensor is therefore its object, its
address, and the number of its signature, which is everything else::

    tensors      layers.0.up    layers.0.down    layers.1.up    layers.1.down
    addresses    0x7f..00       0x7f..40         0x7f..80       0x7f..c0
    numbers      0              1                0              1
    signatures   0: sharded by rows over this mesh, [4, 8], bfloat16     1: [8, 4], bfloat16

Reading a signature takes most of the time of listing a model. A model that is given again, as for
another engine, mostly has the same objects, whose signatures are only compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from reshard.layout import Layout
from reshard.torch.endpoint import MIN_ADDRESS, WITH_MEMORY, is_freed

# The strides of a tensor's memory, and its other properties.
_STRIDES: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
_LIKE = attrgetter("shape", "dtype", "device", "requires_grad")
_META = torch.device("meta")
# The sharding of a DTensor; torch before 2.10 has no order of shards.
_CUT = attrgetter(
    "mesh", "placements", "tensor_meta", *["shard_order"] * hasattr(DTensorSpec, "shard_order")
)


class MemoryColumns(NamedTuple):
    """Addresses of tensors, and numbers that are equal for equal memory layouts.

    Tensors of equal numbers have the same device, dtype, shape and strides.
    """

    addresses: list[int]
    numbers: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> MemoryColumns:
        """Return the columns of tensors."""
        signatures: dict[object, int] = {}
        properties = zip(map(_STRIDES, tensors), map(_LIKE, tensors), strict=True)
        numbers = [signatures.setdefault(signature, len(signatures)) for signature in properties]
        return cls(list(map(torch.Tensor.data_ptr, tensors)), numbers)

    def firsts(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the first tensor of each number."""
        return dict(zip(reversed(self.numbers), reversed(tensors), strict=True))


class TensorSignature(NamedTuple):
    """The common properties of tensors with equal numbers.

    Attributes:
        cut: how they are sharded, with meshes by id, or None for whole tensors.
        is_odd: whether they cannot be moved as they are, or are marked as parts.
        strides, like: properties of their memory, or None if this rank has none.
    """

    cut: object
    is_odd: bool
    strides: tuple[int, ...] | None = None
    like: tuple[torch.Size, torch.dtype, torch.device, bool] | None = None

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd records operations on them."""
        return self.like is not None and self.like[-1]


@dataclass(eq=False)
class ParameterColumns:
    """Tensors with their parts on this rank, and the numbers of their signatures.

    A value with a layout may lack a tensor, and then it has no address.

    Attributes:
        values: as given.
        tensors, locals: the tensor of each value, and its part on this rank.
        addresses: of the parts on this rank.
        numbers: the number of each value's signature.
        signatures: the fields of `TensorSignature` as tuples, with their numbers.
        meshes: the meshes by id, kept alive so that the ids stay unique.
    """

    values: Sequence[Any]
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    locals: list[torch.Tensor | None] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    signatures: dict[tuple[Any, ...], int] = field(default_factory=dict)
    meshes: dict[int, Any] = field(default_factory=dict)
    _cuts: list[tuple[Any, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, values: Sequence[Any]) -> ParameterColumns | None:
        """Return the columns of a model, or None if a tensor has to be handled separately."""
        columns = cls(values)
        tensors, locals_of, addresses = columns.tensors, columns.locals, columns.addresses
        numbers, signatures, meshes, cuts = (
            columns.numbers,
            columns.signatures,
            columns.meshes,
            columns._cuts,
        )
        # A single pass, since reading many tensors is bound by memory.
        for value in values:
            local = tensor = value
            sharding: object = None
            if type(value) is DTensor:
                local = value._local_tensor
                mesh, placements, meta, *order = cut = _CUT(value._spec)
                cuts.append(cut)
                # torch's own hashes take longer than everything else.
                meshes[id(mesh)] = mesh
                # Querying the tensor's shape takes as long as all of these.
                sharding = (id(mesh), *map(_identify_placement, placements), meta.shape, *order)
            elif type(value) is tuple and len(value) == 2 and type(value[1]) is Layout:
                tensor, sharding = value
                local = tensor
            if local is None and sharding is not None:
                signature: tuple[Any, ...] = (sharding, False, None, None)
            elif type(local) in WITH_MEMORY and local.layout is torch.strided:
                like = _LIKE(local)
                is_part = tensor is value and is_marked(tensor)
                is_odd = is_part or local.is_neg() or (like[1].is_complex and local.is_conj())
                signature = (sharding, is_odd, local.stride(), like)
                address = local.data_ptr()
                if address < MIN_ADDRESS and is_freed(local):
                    return None
                addresses.append(address)
            else:
                return None
            tensors.append(tensor)
            locals_of.append(local)
            numbers.append(signatures.setdefault(signature, len(signatures)))
        return columns

    def is_unchanged(self, values: Sequence[Any]) -> bool:
        """Return whether these are the same objects with equal properties; False if any is odd."""
        if len(values) != len(self.values) or not all(map(operator.is_, values, self.values)):
            return False
        dtensors = [value for value in values if type(value) is DTensor]
        if dtensors:
            now = map(attrgetter("_local_tensor"), dtensors)
            are_cut = [type(value) is DTensor for value in values]
            if not all(map(operator.is_, now, compress(self.locals, are_cut))):
                return False
            if list(map(_CUT, map(attrgetter("_spec"), dtensors))) != self._cuts:
                return False
        if self.have_odd or any(map(is_marked, self._list_plain())):
            return False
        parts = [local for local in self.locals if local is not None]
        numbers = compress(self.numbers, [local is not None for local in self.locals])
        memory = [(signature.strides, signature.like) for signature in self.list_signatures()]
        before = zip(self.addresses, map(memory.__getitem__, numbers), strict=True)
        # A single pass, as above.
        like = zip(map(_STRIDES, parts), map(_LIKE, parts), strict=True)
        current = zip(map(torch.Tensor.data_ptr, parts), like, strict=True)
        if not all(map(operator.eq, before, current)) or any(map(torch.Tensor.is_neg, parts)):
            return False
        are_complex = (value.dtype.is_complex for value in parts)
        has_complex = any(
            signature.like and signature.like[1].is_complex for signature in self.list_signatures()
        )
        return not has_complex or not any(map(torch.Tensor.is_conj, compress(parts, are_complex)))

    def list_signatures(self) -> list[TensorSignature]:
        """Return the signatures by number."""
        return [TensorSignature(*signature) for signature in self.signatures]

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors that exist."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def memory_columns(self) -> MemoryColumns:
        """The memory of these."""
        are_held = [tensor is not None for tensor in self.tensors]
        return MemoryColumns(self.addresses, list(compress(self.numbers, are_held)))

    @property
    def have_odd(self) -> bool:
        """Whether any cannot be moved as it is, or is marked as a part."""
        return any(
            signature.is_odd or (signature.like is not None and signature.like[2] == _META)
            for signature in self.list_signatures()
        )

    @property
    def have_plain(self) -> bool:
        """Whether any is replicated on every rank that has it."""
        return any(signature.cut is None for signature in self.list_signatures())

    def _list_plain(self) -> Iterator[torch.Tensor]:
        return (value for value in self.values if type(value) in WITH_MEMORY)


def _identify_placement(placement: Placement) -> object:
    """Return a hashable description of a placement that is faster than torch's."""
    if type(placement) is Shard:
        return placement.dim
    return None if type(placement) is Replicate else placement


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether Megatron marks a parameter as a shard.

    >>> is_marked(torch.zeros(2))
    False
    """
    return bool(getattr(tensor, "tensor_model_parallel", False))
