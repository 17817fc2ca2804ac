"""This rank's tensors of a model: listed as columns, and where they are in memory.

Tensors of many layers differ only in their memory addresses. A tensor is therefore its object, its
address, and the number of its signature, which is everything else (`ParameterColumns`)::

    tensors      layers.0.up    layers.0.down    layers.1.up    layers.1.down
    addresses    0x7f..00       0x7f..40         0x7f..80       0x7f..c0
    numbers      0              1                0              1
    signatures   0: sharded by rows over this mesh, [4, 8], bfloat16     1: [8, 4], bfloat16

Reading a signature takes most of the time of listing a model. A model that is given again, as for
another engine, mostly has the same objects, whose signatures are only compared; its listing is
reused (`ListingCache`).

A target must not share memory with a source or another target, except for names of a tensor that
are declared tied. Sources may share memory; of two names of a tensor one is used. Most tensors are
disjoint by their first and last bytes; if these ranges overlap, as those of columns of a matrix do,
elements are compared.

Samples and digests show whether the copies of ranks are equal. A plain tensor counts as replicated
on every rank that has it. A sample detects ranks with different parts before anything is sent; a
digest covers all elements.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from reshard.errors import RunError, ShardError
from reshard.geometry.regions import Region
from reshard.geometry.strided_overlap import trace_copy
from reshard.layout import Layout
from reshard.megatron.names import resolve_tie
from reshard.runs import IntArray
from reshard.torch import endpoint
from reshard.torch.exchange.packing.messages import cut, view_bytes
from reshard.torch.fully_sharded import find_groups, find_storage, list_gathered
from reshard.torch.models.model_manifest import ModelManifest

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

    A value with a layout may lack a tensor and its address.

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
            elif type(local) in endpoint.WITH_MEMORY and local.layout is torch.strided:
                like = _LIKE(local)
                is_part = tensor is value and is_marked(tensor)
                is_odd = is_part or local.is_neg() or (like[1].is_complex and local.is_conj())
                signature = (sharding, is_odd, local.stride(), like)
                address = local.data_ptr()
                # FSDP and ZeRO-3 free the memory of tensors that modules keep.
                if address < endpoint.MIN_ADDRESS and endpoint.is_freed(local):
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
        plain = (value for value in self.values if type(value) in endpoint.WITH_MEMORY)
        if self.have_odd or any(map(is_marked, plain)):
            return False
        parts = [local for local in self.locals if local is not None]
        numbers = compress(self.numbers, [local is not None for local in self.locals])
        memory = [(signature.strides, signature.like) for signature in self.kinds]
        before = zip(self.addresses, map(memory.__getitem__, numbers), strict=True)
        # A single pass, as above.
        like = zip(map(_STRIDES, parts), map(_LIKE, parts), strict=True)
        current = zip(map(torch.Tensor.data_ptr, parts), like, strict=True)
        if not all(map(operator.eq, before, current)) or any(map(torch.Tensor.is_neg, parts)):
            return False
        are_complex = (value.dtype.is_complex for value in parts)
        has_complex = any(
            signature.like and signature.like[1].is_complex for signature in self.kinds
        )
        return not has_complex or not any(map(torch.Tensor.is_conj, compress(parts, are_complex)))

    @cached_property
    def kinds(self) -> list[TensorSignature]:
        """The signatures by number."""
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
            for signature in self.kinds
        )

    @property
    def have_plain(self) -> bool:
        """Whether any is replicated on every rank that has it."""
        return any(signature.cut is None for signature in self.kinds)


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


_DTYPE = operator.attrgetter("dtype")
_IS_DENSE: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
# Columns of tensors: dtypes, numbers of elements, whether they are dense, strides of the others.
_FormColumns = tuple[list[torch.dtype], list[int], list[bool], list[tuple[int, ...]]]
# A tensor's device, first byte, end, and name.
_Span = tuple[str, int, int, str]


@dataclass(eq=False)
class LocalTensors:
    """A rank's tensors by common name, and its manifest.

    `tensors` are the model's objects, `locals` their memory on this rank, and `inner` the tensors
    inside of those that wrap others, such as DTensors. `described` determines the listing except
    for memory addresses, or is None if other state does too. `columns` are the values given, if
    they were listed by columns.
    """

    manifest: ModelManifest
    tensors: dict[str, torch.Tensor]
    locals: dict[str, torch.Tensor]
    described: object = None
    columns: ParameterColumns | None = None

    def __post_init__(self) -> None:
        local_tensors = endpoint.list_locals(self.tensors.values())
        # The local tensor of a DTensor may change, so each run queries all of them.
        are_own = list(map(operator.is_, local_tensors, self.tensors.values()))
        self._own = local_tensors if all(are_own) else None
        # Torch counts the writes of a DTensor and of its local tensor separately.
        self.inner = list(compress(local_tensors, map(operator.not_, are_own)))
        known_addresses = self.columns.addresses if self.columns is not None else None
        self._addresses = known_addresses or list(map(torch.Tensor.data_ptr, local_tensors))
        self._forms = _list_forms(local_tensors)

    @cached_property
    def own_memory(self) -> MemoryColumns:
        """The memory of `locals`."""
        if self.columns is None:
            return MemoryColumns.of(list(self.locals.values()))
        memory = self.columns.memory_columns
        if len(self.locals) == len(self.tensors):
            return memory
        are_own = list(map(self.locals.__contains__, self.tensors))
        return MemoryColumns(*(list(compress(column, are_own)) for column in memory))

    def list_changes(self) -> Iterator[tuple[str, str]]:
        """Yield tensors whose memory changed since they were listed, and the change."""
        local_tensors = (
            endpoint.list_locals(self.tensors.values()) if self._own is None else self._own
        )
        now = list(map(torch.Tensor.data_ptr, local_tensors))
        # Nearly always none has changed.
        if now != self._addresses:
            for name, address, address_now in zip(self.tensors, self._addresses, now, strict=True):
                if address_now != address:
                    yield name, f"is at another address than when it was prepared ({address:#x})"
        forms = _list_forms(local_tensors)
        if forms != self._forms:
            rows = zip(self.tensors, _list_rows(self._forms), _list_rows(forms), strict=True)
            for name, before, after in rows:
                if before != after:
                    now_text, then_text = _describe_form(*after), _describe_form(*before)
                    yield name, f"has {now_text}, and had {then_text} when it was prepared"

    def is_unchanged(
        self, tensors: Sequence[torch.Tensor], described: object, addresses: list[int]
    ) -> bool:
        """Return whether these tensors, with this description, would give the same listing."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors.values()))
            and addresses == self._addresses
            and described == self.described
        )

    @cached_property
    def spans(self) -> list[_Span]:
        """The device, first byte, end and name of tensors with elements."""
        return _list_spans(self.locals, self.own_memory)

    @cached_property
    def shard_groups(self) -> tuple[Any, ...]:
        """The groups of FSDP parameters that contain any of the tensors."""
        return find_groups(frozenset(map(find_storage, self.tensors.values())) - {0})

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices of all locals."""
        return {
            tensor.device for tensor in self.own_memory.firsts([*self.locals.values()]).values()
        }

    def list_gaps(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the locals that are not dense."""
        numbers, listed = self.own_memory.numbers, list(self.locals.values())
        firsts = self.own_memory.firsts(listed)
        loose = {number for number, first in firsts.items() if not first.is_contiguous()}
        if loose:
            yield from compress(self.locals.items(), map(loose.__contains__, numbers))

    @cached_property
    def own_manifest(self) -> ModelManifest:
        """The manifest, with names of the same tensor marked."""
        entries = self.manifest.columns.with_aliases(_find_aliases(self.locals, self.spans))
        return replace(self.manifest, entries=entries)


class ListingCache:
    """Listings that are alive elsewhere, reused if the same tensors are listed again."""

    def __init__(self) -> None:
        # By the first tensor, and by the first object given: a tuple may contain a tensor.
        self._by_first: weakref.WeakValueDictionary[int, LocalTensors] = (
            weakref.WeakValueDictionary()
        )

    def keep(self, listing: LocalTensors) -> None:
        """Remember a listing if it can be compared later."""
        first = next(iter(listing.tensors.values()), None)
        if first is not None and listing.described is not None:
            self._by_first[id(first)] = listing
            if listing.columns is not None:
                self._by_first[id(listing.columns.values[0])] = listing

    def read_columns(self, values: Sequence[Any]) -> ParameterColumns | None:
        """Return the columns of the values, reused if they are unchanged."""
        listing = self._by_first.get(id(values[0])) if values else None
        columns = listing.columns if listing is not None else None
        if columns is not None and columns.is_unchanged(values):
            return columns
        return ParameterColumns.of(values)

    def find(
        self, tensors: Sequence[torch.Tensor], described: object, addresses: list[int]
    ) -> LocalTensors | None:
        """Return the listing of these tensors, or None if they changed."""
        listing = self._by_first.get(id(tensors[0])) if tensors else None
        is_known = listing is not None and listing.is_unchanged(tensors, described, addresses)
        return listing if is_known else None


def _list_forms(tensors: Sequence[torch.Tensor]) -> _FormColumns:
    """Return columns of what `t.data = ...` and `t.resize_()` may change in place."""
    numbers, dense = list(map(torch.Tensor.numel, tensors)), list(map(_IS_DENSE, tensors))
    # Strides of dense tensors follow from the rest, and are slower to query than all of it.
    strides = (
        [] if all(dense) else [_STRIDES(tensor) for tensor in tensors if not tensor.is_contiguous()]
    )
    return list(map(_DTYPE, tensors)), numbers, dense, strides


def _list_rows(forms: _FormColumns) -> Iterator[tuple[torch.dtype, int, tuple[int, ...] | None]]:
    """Yield the same for each tensor, with strides only of those that are not dense."""
    dtypes, numbers, dense, strides = forms
    loose = iter(strides)
    for dtype, number, is_dense in zip(dtypes, numbers, dense, strict=True):
        yield dtype, number, None if is_dense else next(loose)


def _describe_form(dtype: torch.dtype, number: int, strides: tuple[int, ...] | None) -> str:
    return f"{number} {'dense ' * (strides is None)}elements of {dtype}" + (
        "" if strides is None else f" with strides {strides}"
    )


def check_memory(
    before: LocalTensors, after: LocalTensors, ties: Mapping[str, str]
) -> tuple[ModelManifest, ModelManifest]:
    """Return both manifests, with problems of the target's memory and names of the same tensor.

    Targets that are the same tensor must be declared tied; they are filled once. Other targets must
    not share memory with each other or with a source.
    """
    problems: list[str] = []
    alias_of: dict[str, str] = {}
    by_address: dict[tuple[str, int], list[str]] = {}
    sources, targets = before.spans, after.spans
    problems += [
        f"{name} of the target: a copy that FSDP gathered of its shards, which is freed with what "
        "is written into it; give the module itself, or take its parameters after reshard()"
        for name in list_gathered(after.tensors)
    ]
    for name, local in after.list_gaps():
        try:
            endpoint.check_writable(local, None)
        except ShardError as error:
            problems.append(f"{name}: {error}")
    # Usually the targets are disjoint, and there is nothing else to check.
    if not problems and _are_apart(sources, targets):
        return before.own_manifest, after.manifest
    for device, begin, _, name in targets:
        # Two names of a tensor are written once if tied, and refused otherwise.
        same_address = by_address.setdefault((device, begin), [])
        local = after.locals[name]
        other = next(
            (candidate for candidate in same_address if _lie_alike(local, after.locals[candidate])),
            None,
        )
        if other is None:
            same_address.append(name)
        elif resolve_tie(name, ties) == resolve_tie(other, ties):
            alias_of[name] = other
        else:
            problems.append(
                f"{name}: one tensor with {other} in the target; if it is to be, declare "
                f"ties={{{name!r}: {other!r}}}"
            )
    filled = [span for span in targets if span[-1] not in alias_of]
    problems += _find_overlaps(after.locals, filled)
    shared = _find_shared(sources, targets)
    if shared:
        problems.append(f"{shared} share memory; a target must not lie where a source is")
    manifest = replace(
        after.manifest,
        entries=after.manifest.columns.with_aliases(alias_of),
        problems=(*after.manifest.problems, *problems),
    )
    return before.own_manifest, manifest


def _find_aliases(tensors: Mapping[str, torch.Tensor], spans: Sequence[_Span]) -> dict[str, str]:
    """Return names of tensors that are the same as an earlier tensor, with its name."""
    aliases: dict[str, str] = {}
    if len({span[:2] for span in spans}) == len(spans):
        return aliases
    by_address: dict[tuple[str, int], list[str]] = {}
    for device, begin, _, name in spans:
        same_address = by_address.setdefault((device, begin), [])
        local = tensors[name]
        for other in same_address:
            if local.dtype == tensors[other].dtype and _lie_alike(local, tensors[other]):
                aliases[name] = other
                break
        else:
            same_address.append(name)
    return aliases


def _are_apart(sources: Sequence[_Span], targets: Sequence[_Span]) -> bool:
    """Return whether no target overlaps a target or a source; False if devices differ.

    >>> near, far = [("cpu", 0, 8, "a")], [("cpu", 8, 12, "b")]
    >>> _are_apart(near, far), _are_apart(near, [("cpu", 7, 12, "b")])
    (True, False)
    """
    if len({span[0] for span in (*sources, *targets)}) > 1:
        return False
    begin, end = _sort_ends(targets)
    if (end[:-1] > begin[1:]).any():
        return False
    # A source is disjoint from the targets that begin before it if the last of them ends before it.
    low, high = _sort_ends(sources)
    following = np.searchsorted(begin, low)
    before = np.concatenate(([np.iinfo(np.int64).min], end))[following]
    after = np.concatenate((begin, [np.iinfo(np.int64).max]))[following]
    return not ((before > low) | (after < high)).any()


def _sort_ends(spans: Sequence[_Span]) -> tuple[IntArray, IntArray]:
    begin = np.array([span[1] for span in spans], dtype=np.int64)
    end = np.array([span[2] for span in spans], dtype=np.int64)
    order = np.argsort(begin, kind="stable")
    return begin[order], end[order]


def _lie_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors that begin at the same address are the same."""
    return tuple(first.shape) == tuple(second.shape) and first.stride() == second.stride()


def _find_shared(sources: Sequence[_Span], targets: Sequence[_Span]) -> str:
    """Return the first source and target that share memory, or an empty text."""
    # Sweep by address: for each side, the furthest end so far.
    spans = sorted(
        (device, begin, end, number, name)
        for number, side in enumerate((sources, targets))
        for device, begin, end, name in side
    )
    reach: list[tuple[str, int, str]] = [("", 0, "")] * 2
    for device, begin, end, number, name in spans:
        where, furthest, holder = reach[1 - number]
        if where == device and begin < furthest:
            return f"{name} and {holder}"
        if reach[number][:2] < (device, end):
            reach[number] = (device, end, name)
    return ""


def _list_spans(tensors: Mapping[str, torch.Tensor], memory: MemoryColumns) -> list[_Span]:
    """Return the device, first byte, end and name of tensors with elements."""
    ends: dict[int, tuple[str, int]] = {}
    for number, first in memory.firsts(list(tensors.values())).items():
        begin, end = endpoint.find_addresses(first)
        ends[number] = str(first.device), end - begin
    return [
        (device, begin, begin + size_bytes, name)
        for name, begin, (device, size_bytes) in zip(
            tensors, memory.addresses, map(ends.__getitem__, memory.numbers), strict=True
        )
        if size_bytes
    ]


def _find_overlaps(tensors: Mapping[str, torch.Tensor], spans: Sequence[_Span]) -> Iterator[str]:
    """Yield problems of targets that share part of their memory."""
    reaching: list[_Span] = []
    for device, begin, end, name in sorted(spans):
        reaching = [span for span in reaching if span[0] == device and span[2] > begin]
        for *_, other in reaching:
            if _share_elements(tensors[name], tensors[other]):
                yield (
                    f"{name} and {other} of the target share some of their memory; give each "
                    "memory of its own"
                )
                break
        reaching.append((device, begin, end, name))


def _share_elements(first_tensor: torch.Tensor, second_tensor: torch.Tensor) -> bool:
    begin = min(first_tensor.data_ptr(), second_tensor.data_ptr())
    first, second = (
        Region(
            (0,) * (tensor.ndim + 1),
            # Bytes are a dimension too, since the tensors may have different element types.
            (*tensor.shape, tensor.element_size()),
            "memory",
            tensor.data_ptr() - begin,
            (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
        )
        for tensor in (first_tensor, second_tensor)
    )
    try:
        return any(True for _ in trace_copy(first, second, second))
    except RunError:
        # Too large to compare by elements: their byte ranges decide.
        return True


# A sample has at least this many indices of each dimension, evenly spaced.
_SAMPLED = 8
_DIGEST_BYTES = 8
# The bytes read at once for a digest.
_AT_ONCE_BYTES = 1 << 24


def sample_digest(tensor: torch.Tensor) -> str:
    """Return a digest of some elements, evenly spaced in a tensor.

    >>> sample_digest(torch.zeros(4, 4)) == sample_digest(torch.zeros(4, 4))
    True
    >>> sample_digest(torch.zeros(4, 4)) == sample_digest(torch.ones(4, 4))
    False
    >>> sample_digest(torch.zeros(1, 2)[:, 1]) == sample_digest(torch.zeros(1))
    True
    """
    steps = tuple(slice(None, None, max(size // _SAMPLED, 1)) for size in tensor.shape)
    return hashlib.blake2b(_bytes_of(tensor[steps]), digest_size=_DIGEST_BYTES).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of all elements.

    >>> tensor_digest(torch.arange(6.0)) == tensor_digest(torch.arange(12.0)[::2] / 2)
    True
    """
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if tensor.numel():
        for part in cut(tensor, _AT_ONCE_BYTES):
            hasher.update(_bytes_of(part))
    return hasher.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    return view_bytes(tensor).cpu().numpy().data if tensor.numel() else b""
