"""Sides of a redistribution: a layout, and the type of its local tensors.

A side is described by a `Layout`, by a `ShardingSpec` with a shape, or by a torch mesh with
placements. Only a torch mesh has DTensors, unless a placement is not a placement of torch.
Placements are read by `reshard.notation.dtensor`, which documents their meaning.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reshard.binding import dense_strides
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor
from reshard.runs import distinct
from reshard.sharding import ShardingSpec
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.copies import empty_result

# Cached, since torch computes the ranks of a mesh on each access, which takes longer than the rest
# of a small redistribution. The ranks of a submesh depend on the accessing rank.
_MESHES: weakref.WeakKeyDictionary[Any, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of(torch_mesh: Any) -> DeviceMesh:
    """Return the mesh of a torch `DeviceMesh`, as seen from this process."""
    by_rank = _MESHES.setdefault(torch_mesh, {})
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank not in by_rank:
        by_rank[rank] = dtensor.mesh_of(torch_mesh)
    return by_rank[rank]


def sharding_of_placements(torch_mesh: Any, placements: Sequence[Any], ndim: int) -> ShardingSpec:
    """Return the sharding by placements over a `DeviceMesh`, for `ndim` dimensions.

    Raises:
        NotationError: a placement that reshard cannot represent, several different reductions, or
            more or fewer placements than the mesh has dimensions.
    """
    return dtensor.sharding_of_placements(mesh_of(torch_mesh), placements, ndim)


def sharding_of_dtensor(tensor: DTensor) -> ShardingSpec:
    """Return the sharding of a DTensor. Raises as `sharding_of_placements`."""
    return dtensor.sharding_of_dtensor(tensor, mesh_of(tensor.device_mesh))


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a DTensor over ranks; a plain tensor is on rank 0 of a single rank."""
    if isinstance(tensor, DTensor):
        return sharding_of_dtensor(tensor).layout(tuple(tensor.shape))
    return Layout.whole(tuple(tensor.shape), [0], 1)


def rank_of(tensor: torch.Tensor) -> int:
    """Return the rank of this process in `layout_of(tensor)`."""
    if isinstance(tensor, DTensor):
        return int(dist.get_rank())
    return 0


# Types of tensors that own their memory.
WITH_MEMORY = {torch.Tensor, torch.nn.Parameter}
FREED = "its storage was freed, as FSDP frees gathered parameters; take the tensor again"
# On the systems of PyTorch nearly all memory is above this address; below it, check the storage.
MIN_ADDRESS = 1 << 40
Description = tuple[Any, Sequence[Any]] | ShardingSpec | Layout


@dataclass(frozen=True, slots=True)
class TensorEndpoint:
    """A layout over global ranks; `mesh` and `placements` if its tensors are DTensors.

    `spec` is its sharding, or None if it was given as a layout.
    """

    layout: Layout
    mesh: Any = None
    placements: tuple[Any, ...] = ()
    spec: ShardingSpec | None = None

    @classmethod
    def of(
        cls, described: Description, shape: Sequence[int] | None, what: str, group: RankGroup
    ) -> TensorEndpoint:
        """Return the described side; `what` is its name in errors.

        A torch mesh has the ranks of its own job; other descriptions have those of the group.

        Raises:
            UsageError: something that describes no side, or that needs a shape and has none.
            LayoutError: placements or a spec that do not fit the shape.
        """
        if isinstance(described, Layout):
            return cls(described)
        if isinstance(described, ShardingSpec):
            return cls(described.layout(_require_shape(shape, what)), spec=described)
        if isinstance(described, tuple) and len(described) == 2:
            mesh, placements = described
            if hasattr(mesh, "mesh_dim_names") and isinstance(placements, list | tuple):
                spec = sharding_of_placements(mesh, placements, len(_require_shape(shape, what)))
                spec = place_sharding(spec, group)
                layout = spec.layout(_require_shape(shape, what))
                if all(isinstance(placement, TorchPlacement) for placement in placements):
                    return cls(layout, mesh, tuple(placements), spec)
                return cls(layout, spec=spec)
        raise UsageError(
            f"a {what} of type {type(described).__name__}; give (torch DeviceMesh, [placements]), "
            "a ShardingSpec or a Layout"
        )

    @classmethod
    def of_tensor(cls, tensor: DTensor, group: RankGroup) -> TensorEndpoint:
        """Return the side of a DTensor."""
        spec = place_sharding(sharding_of_dtensor(tensor), group)
        layout = spec.layout(tuple(tensor.shape))
        return cls(layout, tensor.device_mesh, tuple(tensor.placements), spec)

    def describe(self) -> str:
        """Return the side as text, for errors.

        >>> from reshard import DeviceMesh, spec
        >>> rows = spec(DeviceMesh.of(tp=2), "tp, -")
        >>> TensorEndpoint(rows.layout((4, 6)), spec=rows).describe()
        'tp, - over tp=2 of shape [4, 6]'
        """
        shape = f"of shape {list(self.layout.shape)}"
        if self.placements:
            ranks = self.mesh.mesh.tolist()
            return f"{list(self.placements)} over the ranks {ranks} {shape}"
        if self.spec is not None:
            return f"{self.spec} over {self.spec.mesh.text} {shape}"
        return f"{self.layout} {shape}"

    def shape_on(self, rank: int) -> tuple[int, ...] | None:
        """Return the local shape on a rank, or None if it holds nothing."""
        return self.layout.local_shape(rank) if rank < self.layout.slots else None

    def wrap_local(
        self, local: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Return a rank's local tensor as a DTensor, or unchanged if the side has no DTensors."""
        if self.mesh is None:
            return local
        shape = self.layout.shape
        if local is None:
            # A DTensor has a local tensor on every rank, even if it is empty.
            local = torch.empty(0, dtype=dtype, device=device)
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            # Its check would communicate, and the ranks have agreed already.
            run_check=False,
            # Of unequal shards, torch would compute another shape from that of the local tensor.
            shape=torch.Size(shape),
            stride=dense_strides(shape),
        )


def place_sharding(spec: ShardingSpec, group: RankGroup) -> ShardingSpec:
    """Return a sharding over this process's job with the numbers of its ranks in a group.

    Raises ShardError if the group spans several jobs, and lacks ranks of the mesh.
    """
    if not group.is_across_jobs:
        return spec
    return spec.replace(mesh=group.place(spec.mesh))


def shape_of(*described: Description | None) -> tuple[int, ...] | None:
    """Return the shape of the first layout among descriptions, or None."""
    return next(
        (description.shape for description in described if isinstance(description, Layout)), None
    )


def _require_shape(shape: Sequence[int] | None, what: str) -> tuple[int, ...]:
    if shape is None:
        raise UsageError(
            f"the {what} has no shape of its own; give shape=, that of the whole tensor"
        )
    return tuple(shape)


def is_sharded_array(value: object) -> bool:
    """Return whether a value is an array of `reshard.spmd`, which this package does not import."""
    return hasattr(value, "shards") and type(value).__module__.startswith("reshard.spmd.")


def lay_out_array(array: Any) -> tuple[torch.Tensor | None, ShardingSpec]:
    """Return this process's shard of an array of `reshard.spmd`, and the array's sharding.

    The tensor shares the shard's memory. It is None on a process without a shard.

    Raises:
        UsageError: an array that is not sharded, or whose devices are simulated in one process.
    """
    if array.spec is None:
        raise UsageError(
            f"{array!r} is not sharded, so no ranks have it; give x.shard(mesh, dims), or its "
            "elements, x.to_dense()"
        )
    rank = dist.get_rank()
    shards = dict(array.shards)
    if shards.keys() - {rank}:
        raise UsageError(
            f"the devices of {array!r} are simulated in this process; make it with "
            "sp.running(sp.over_processes()), so that each rank has its shard"
        )
    shard = shards.get(rank)
    if isinstance(shard, np.ndarray):
        kind = as_dtype(shard.dtype)
        # Copy read-only memory, for which PyTorch would emit a warning.
        own = shard if shard.flags.writeable else shard.copy()
        if own.dtype.isbuiltin == 2:
            # PyTorch has its own names for these types.
            shard = torch.from_numpy(own.view(kind.storage)).view(getattr(torch, kind.name))
        else:
            shard = torch.from_numpy(own)
    return shard, array.spec


def local_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's own tensor, detached, with conjugate and negative views resolved."""
    if tensor is None:
        return None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = _unwrap_memory(local).detach()
    # A lazy conjugate or negative has other bytes than its elements.
    if local.is_conj() or local.is_neg():
        return local.resolve_conj().resolve_neg()
    return local


def _unwrap_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that wraps another with equal elements, as in float8 training.

    Raises ShardError for a tensor that wraps several, such as quantized weights with their scales.
    """
    local: Any = tensor
    while type(local) not in WITH_MEMORY and is_traceable_wrapper_subclass(local.data):
        # A parameter of a wrapper is a wrapper, too.
        inside = local.data
        names, _ = inside.__tensor_flatten__()
        inner = getattr(inside, names[0]) if len(names) == 1 else None
        if inner is None or (inner.shape, inner.dtype) != (local.shape, local.dtype):
            raise ShardError(
                f"{type(inside).__name__} has no memory of its own: its elements are "
                f"computed of {', '.join(names)}. Give these tensors, by names of their own, or "
                "its dequantised elements and the other side's quantize="
            )
        local = inner
    return cast(torch.Tensor, local)


def check_local(
    tensor: torch.Tensor | None, side: TensorEndpoint, dtype: DType, rank: int, what: str
) -> torch.Tensor | None:
    """Return this rank's part of a side, or None if it holds nothing.

    Raises:
        ShardError: the tensor is missing, or its shape, dtype or type does not match the layout.
    """
    expected = side.shape_on(rank)
    if expected is None:
        return None
    if tensor is None:
        raise ShardError(f"{what} is None, but this rank holds a part of shape {list(expected)}")
    if not isinstance(tensor, torch.Tensor):
        raise ShardError(f"{what} is a {type(tensor).__name__}; give a torch tensor")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ShardError(
            f"{what} is a {tensor.layout} tensor on {tensor.device}; give one that is dense and "
            "in memory"
        )
    if as_dtype(tensor.dtype) is not dtype:
        raise ShardError(f"{what} is {tensor.dtype}, expected {dtype.name}; nothing is cast")
    local = local_of(tensor)
    if local is not None and is_freed(local):
        raise ShardError(f"{what}: {FREED}")
    if local is None or tuple(local.shape) != expected:
        local_shape = [] if local is None else list(local.shape)
        raise ShardError(f"{what} has local shape {local_shape}, the layout says {list(expected)}")
    return local


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor with elements was freed.

    >>> value = torch.ones(4)
    >>> view = value[2:]
    >>> is_freed(view), is_freed(torch.ones(0))
    (False, False)
    >>> _ = value.untyped_storage().resize_(0)
    >>> is_freed(view)
    True
    """
    # A freed tensor begins at its offset from address 0.
    if tensor.data_ptr() >= MIN_ADDRESS or not tensor.numel():
        return False
    return not tensor.untyped_storage().nbytes()


def check_no_lazy_bits(out: torch.Tensor) -> None:
    """Raise ShardError for a target whose elements are not the bytes of its memory.

    PyTorch marks `x.conj()` and `x.imag` of a conjugate, and applies the mark when they are read.
    """
    local = out._local_tensor if isinstance(out, DTensor) else out
    for kind, is_lazy in (("conj", local.is_conj()), ("neg", local.is_neg())):
        if is_lazy:
            raise ShardError(
                f"out has PyTorch's lazy {kind} bit: its elements are not the bytes of its memory; "
                f"give out.resolve_{kind}(), which has memory of its own"
            )


def check_writable(out: torch.Tensor, source: torch.Tensor | None) -> None:
    """Raise ShardError for a target whose elements overlap each other or the source."""
    # Tensors without elements count as contiguous, whatever their strides.
    if not out.is_contiguous() and _has_overlap(out):
        raise ShardError(
            f"out has shape {list(out.shape)} and strides {list(out.stride())}, so that elements "
            "of it share memory; give it memory of its own"
        )
    if source is None or source.device != out.device:
        return
    # By the bytes from first to last element: interleaved views of one memory are refused as well.
    (begin, end), (low, high) = find_addresses(out), find_addresses(source)
    if begin < high and low < end:
        raise ShardError("out shares memory with the tensor itself; give it memory of its own")


def _has_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as those of `expand` and `unfold` do."""
    dims = sorted(
        (stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1
    )
    last = 0
    for stride, n in dims:
        # In ascending order, a dimension whose stride exceeds the span of all before it cannot
        # overlap them.
        if stride <= last:
            break
        last += stride * (n - 1)
    else:
        return False
    # Strides that interleave without meeting are rare: the offsets themselves decide.
    offsets = np.zeros(1, np.int64)
    for stride, n in dims:
        offsets = (offsets[:, None] + stride * np.arange(n)).ravel()
    return len(distinct(offsets)) < len(offsets)


def find_target_local(
    out: torch.Tensor | None,
    side: TensorEndpoint,
    dtype: torch.dtype,
    own: torch.Tensor | None,
    device: torch.device,
    group: RankGroup,
) -> torch.Tensor | None:
    """Return the local tensor of a target: `out`, or a new tensor, or None if nothing is held.

    Raises ShardError for an `out` that the target cannot be written into.
    """
    shape = side.shape_on(group.rank)
    if isinstance(out, DTensor) and TensorEndpoint.of_tensor(out, group).layout is not side.layout:
        raise ShardError(
            f"out is a DTensor of placements {list(out.placements)}, which is not the target"
        )
    if shape is None:
        return None
    if out is None:
        return empty_result(shape, dtype, device)
    if is_sharded_array(out):
        raise UsageError("out is an array of reshard.spmd, which is immutable; give a torch tensor")
    if isinstance(out, torch.Tensor):
        check_no_lazy_bits(out)
    local = check_local(out, side, as_dtype(dtype), group.rank, "out")
    if local is None or local.device != device:
        raise ShardError(f"out is on {out.device}, the tensor on {device}; give them one device")
    check_writable(local, own)
    return local


def check_ranks(change: LayoutChange, group: RankGroup) -> None:
    """Raise UsageError for a layout over ranks that are not in the group."""
    members = set(group.ranks)
    for what, layout in (("source", change.source), ("target", change.target)):
        missing = sorted(set(layout.holders) - members)
        if missing:
            raise UsageError(
                f"the {what} has parts on ranks {missing[:8]}, which are not in the group of "
                f"{len(members)} ranks; give a group of all ranks of both sides"
            )


def find_addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory and its end; (0, 0) if it has no elements."""
    if not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        begin = tensor.data_ptr()
        return begin, begin + tensor.nbytes
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (steps + 1) * tensor.element_size()


def list_locals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local tensors in few Python operations, since every run calls this.

    >>> here = torch.zeros(4)
    >>> list_locals([here])[0] is here
    True
    """
    listed = list(tensors)
    # The local tensor of a DTensor is fetched anew, since it may have been replaced.
    if not set(map(type, listed)) <= WITH_MEMORY:
        listed = [getattr(tensor, "_local_tensor", tensor) for tensor in listed]
    if not set(map(type, listed)) <= WITH_MEMORY:
        listed = [local for local in map(local_of, listed) if local is not None]
    return listed
