"""Tensors of a model as columns: what each has of its own, and once what many have alike.

Tensors of many layers are alike but for where they lie. So a tensor is its object, its address,
and the number of its look, which is all that can be told of it without its memory::

    tensors     layers.0.up    layers.0.down    layers.1.up    layers.1.down
    addresses   0x7f..00       0x7f..40         0x7f..80       0x7f..c0
    numbers     0              1                0              1
    looks       0: cut by rows over this mesh, [4, 8], bfloat16     1: [8, 4], bfloat16

To read a look takes most of the time that listing a model takes. A model that is given again, as
for another engine, mostly has the same objects: of these it is only asked whether they still look
as they did.
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

# What a tensor's memory is like: its strides, and all else.
_STRIDES: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
_LIKE = attrgetter("shape", "dtype", "device", "requires_grad")
_META = torch.device("meta")
# How a DTensor is cut; versions of torch before 2.10 say no order of shards.
_CUT = attrgetter(
    "mesh", "placements", "tensor_meta", *["shard_order"] * hasattr(DTensorSpec, "shard_order")
)


class HeldMemory(NamedTuple):
    """Where tensors lie: of each the first byte, and a number; those of one number lie alike.

    That is, they have one device, dtype, shape and strides.
    """

    addresses: list[int]
    numbers: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> HeldMemory:
        """That of some tensors."""
        looks: dict[object, int] = {}
        said = zip(map(_STRIDES, tensors), map(_LIKE, tensors), strict=True)
        numbers = [looks.setdefault(look, len(looks)) for look in said]
        return cls(list(map(torch.Tensor.data_ptr, tensors)), numbers)

    def firsts(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """By number, the first of these tensors."""
        return dict(zip(reversed(self.numbers), reversed(tensors), strict=True))


class TensorLook(NamedTuple):
    """What tensors of one number have alike.

    Attributes:
        cut: how they are cut; None for those that are whole. A mesh is said by its id.
        is_odd: whether they cannot be moved as they are, or are not whole though they seem to be.
        strides, like: what their memory is like; None where this rank has none.
    """

    cut: object
    is_odd: bool
    strides: tuple[int, ...] | None = None
    like: tuple[torch.Size, torch.dtype, torch.device, bool] | None = None

    @property
    def needs_gradient(self) -> bool:
        """Whether torch records what is done with them."""
        return self.like is not None and self.like[-1]


@dataclass(eq=False)
class GivenColumns:
    """Tensors, what each has on this rank, and all that it has alike with others.

    With a layout there may be no tensor, and then no address.

    Attributes:
        values: as they were given.
        tensors, locals: of each the tensor, and what of it is on this rank.
        addresses: of those that are on this rank.
        numbers: of each, that of its look.
        looks: what tensors of one number have alike, as tuples that `TensorLook` is, with it.
        meshes: those that looks say by their ids, so that no other has such an id.
    """

    values: Sequence[Any]
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    locals: list[torch.Tensor | None] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    looks: dict[tuple[Any, ...], int] = field(default_factory=dict)
    meshes: dict[int, Any] = field(default_factory=dict)
    _cuts: list[tuple[Any, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, values: Sequence[Any]) -> GivenColumns | None:
        """Those of a model; None where any of its tensors has to be looked at by itself."""
        found = cls(values)
        tensors, locals_of, addresses = found.tensors, found.locals, found.addresses
        numbers, looks, meshes, cuts = found.numbers, found.looks, found.meshes, found._cuts
        # One pass: of very many tensors each is read from memory anew.
        for one in values:
            local = tensor = one
            said: object = None
            if type(one) is DTensor:
                local = one._local_tensor
                mesh, placements, meta, *order = cut = _CUT(one._spec)
                cuts.append(cut)
                # Torch's own hashes take longer than all else of a tensor.
                meshes[id(mesh)] = mesh
                # To ask the tensor for its shape takes as long as all of these.
                said = (id(mesh), *map(_identify_placement, placements), meta.shape, *order)
            elif type(one) is tuple and len(one) == 2 and type(one[1]) is Layout:
                tensor, said = one
                local = tensor
            if local is None and said is not None:
                look: tuple[Any, ...] = (said, False, None, None)
            elif type(local) in WITH_MEMORY and local.layout is torch.strided:
                like = _LIKE(local)
                is_part = tensor is one and is_marked(tensor)
                is_odd = is_part or local.is_neg() or (like[1].is_complex and local.is_conj())
                look = (said, is_odd, local.stride(), like)
                address = local.data_ptr()
                if address < MIN_ADDRESS and is_freed(local):
                    return None
                addresses.append(address)
            else:
                return None
            tensors.append(tensor)
            locals_of.append(local)
            numbers.append(looks.setdefault(look, len(looks)))
        return found

    def is_still(self, values: Sequence[Any]) -> bool:
        """Whether these are the same objects, and all that columns say of them is as it was.

        Of tensors some of which are odd it is not.
        """
        if len(values) != len(self.values) or not all(map(operator.is_, values, self.values)):
            return False
        cut = [one for one in values if type(one) is DTensor]
        if cut:
            now = map(attrgetter("_local_tensor"), cut)
            are_cut = [type(one) is DTensor for one in values]
            if not all(map(operator.is_, now, compress(self.locals, are_cut))):
                return False
            if list(map(_CUT, map(attrgetter("_spec"), cut))) != self._cuts:
                return False
        if self.have_odd or any(map(is_marked, self._list_plain())):
            return False
        held = [local for local in self.locals if local is not None]
        own = compress(self.numbers, [local is not None for local in self.locals])
        memory = [(look.strides, look.like) for look in self.list_looks()]
        before = zip(self.addresses, map(memory.__getitem__, own), strict=True)
        # One pass, as above.
        like = zip(map(_STRIDES, held), map(_LIKE, held), strict=True)
        found = zip(map(torch.Tensor.data_ptr, held), like, strict=True)
        if not all(map(operator.eq, before, found)) or any(map(torch.Tensor.is_neg, held)):
            return False
        are_complex = (one.dtype.is_complex for one in held)
        has_complex = any(look.like and look.like[1].is_complex for look in self.list_looks())
        return not has_complex or not any(map(torch.Tensor.is_conj, compress(held, are_complex)))

    def list_looks(self) -> list[TensorLook]:
        """What tensors have alike, by number."""
        return [TensorLook(*look) for look in self.looks]

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors that there are."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def held_memory(self) -> HeldMemory:
        """Where these lie."""
        are_held = [tensor is not None for tensor in self.tensors]
        return HeldMemory(self.addresses, list(compress(self.numbers, are_held)))

    @property
    def have_odd(self) -> bool:
        """Whether any cannot be moved as it is, or is not whole though it seems to be."""
        return any(
            look.is_odd or (look.like is not None and look.like[2] == _META)
            for look in self.list_looks()
        )

    @property
    def have_plain(self) -> bool:
        """Whether any is whole on every rank that has it."""
        return any(look.cut is None for look in self.list_looks())

    def _list_plain(self) -> Iterator[torch.Tensor]:
        return (one for one in self.values if type(one) in WITH_MEMORY)


def _identify_placement(placement: Placement) -> object:
    if type(placement) is Shard:
        return placement.dim
    return None if type(placement) is Replicate else placement


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a part of one, by Megatron's word.

    >>> is_marked(torch.zeros(2))
    False
    """
    return bool(getattr(tensor, "tensor_model_parallel", False))
