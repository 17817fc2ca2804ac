"""Parameters of FSDP and ZeRO-3: their shards, and the gathered copies that forwards compute with.

After a forward without a backward, the parameters of FSDP's root stay unsharded, and the next
forward uses that copy::

    shards            written by a refit           read by the next all-gather
    unsharded copy    left by the last forward     read by the next forward

Before shards are read or written, their gathered copies are freed. This needs no communication:
the next forward gathers again. All ranks that share the parameters must free them alike.

FSDP1 concatenates the parameters of a unit into a flat parameter, and splits it into a range for
each rank, independent of parameter boundaries::

    parameters   | weight 3 x 4              | bias 4    | pad |
    ranks        | 0               | 1                   |       weight: 0:9 on 0, 9:12 on 1

So a rank has a range of each parameter, in the memory of its shard, which layouts describe.
DeepSpeed's ZeRO-3 splits each parameter separately in this way.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _composable_state
from torch.distributed.tensor import DTensor

from reshard.errors import ShardError
from reshard.layout import Layout

# Several refits may run at the same time, each in its own thread.
_TURN = threading.Lock()
_IDLE = "IDLE"


def find_groups(storages: Collection[int], are_stale: bool = False) -> tuple[Any, ...]:
    """Return the groups of FSDP's parameters whose shards are in the given storages.

    Args:
        storages: the addresses of storages.
        are_stale: whether to omit groups that currently have no copies.
    """
    groups = chain(_list_groups(), map(_FlatGroup, list(_LISTED)))
    candidates = [group for group in groups if not are_stale or _has_copy(group)]
    return tuple(group for group in candidates if not _storages_of(group).isdisjoint(storages))


def free_gathered(groups: Collection[Any]) -> str:
    """Free the gathered copies of groups, so that the next forward uses the shards.

    Returns:
        Why a copy cannot be freed, or an empty text.
    """
    if not any(map(_has_copy, groups)):
        return ""
    with _TURN:
        for group in filter(_has_copy, groups):
            if group._training_state.name != _IDLE:
                return (
                    f"FSDP computes with {group._module_fqn or 'the root'} "
                    f"({group._training_state.name}); run between a step's forward and backward "
                    "passes, not within them"
                )
            with torch.no_grad():
                # The next forward would use the result of an all-gather in progress.
                group.wait_for_unshard()
                group.reshard()
    return ""


def list_gathered(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are copies which FSDP2 gathered of its shards.

    `dict(module.named_parameters())` of an unsharded module contains them. FSDP frees them, and
    values written into them are lost.
    """
    copies = {
        find_storage(parameter._unsharded_param)
        for group in _list_groups()
        if not group.is_sharded
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    } - {0}
    return [name for name, t in tensors.items() if find_storage(t) in copies] if copies else []


def _list_groups() -> Iterator[Any]:
    """Yield the parameter groups of all modules of this process that use `fully_shard`."""
    # Modules of a group share a state. Before torch 2.6 the table contains the states themselves.
    entries = list(_composable_state._module_state_mapping.values())
    states: list[Any] = [entry() if callable(entry) else entry for entry in entries]
    for state in {id(state): state for state in states}.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        yield from groups


def find_detached(module: torch.nn.Module) -> str:
    """Return the name of a parameter for which FSDP2 uses another shard; or empty.

    FSDP2 adopts a parameter that is replaced before the first forward, but not after it.

    >>> find_detached(torch.nn.Linear(2, 2))
    ''
    """
    groups = [group for group in _list_groups() if getattr(group, "_reset_sharded_params", False)]
    if not groups:
        return ""
    names = {id(part): name for name, part in module.named_modules()}
    for parameter in chain.from_iterable(group.fsdp_params for group in groups):
        part, name = parameter._module_info.module, parameter._module_info.param_name
        if id(part) not in names:
            continue
        now = part._parameters.get(name)
        shard = parameter.sharded_param
        is_other = isinstance(now, DTensor) and now is not shard
        if is_other or find_storage(shard) != find_storage(parameter._sharded_param_data):
            return f"{names[id(part)]}.{name}".lstrip(".")
    return ""


def _has_copy(group: Any) -> bool:
    return not group.is_sharded or group._all_gather_result is not None


def _storages_of(group: Any) -> set[int]:
    """Return the addresses of the storages that contain a group's shards."""
    return {find_storage(parameter.sharded_param) for parameter in group.fsdp_params} - {0}


class _FlatGroup:
    """A flat parameter of FSDP1, with the interface of a parameter group of FSDP2."""

    _all_gather_result = None

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.fsdp_params = (self,)
        self._module_fqn = type(handle._fully_sharded_module).__name__

    @property
    def sharded_param(self) -> torch.Tensor:
        """This rank's shard."""
        return find_shard(self._handle)

    @property
    def _training_state(self) -> Any:
        return self._handle._training_state

    @property
    def is_sharded(self) -> bool:
        """Whether the next forward gathers from the shard."""
        if self._handle._use_orig_params and self._training_state.name == _IDLE:
            # Parameters that were assigned other memory are copied into the shard, as in a forward.
            shard = self.sharded_param
            begin, end = shard.data_ptr(), shard.data_ptr() + shard.nbytes
            parameters = self._handle.flat_param._params or ()
            if any(p.numel() and not begin <= p.data_ptr() < end for p in parameters):
                return False
        return not any(copy.untyped_storage().size() for copy in _list_gathered(self._handle))

    def wait_for_unshard(self) -> None:
        """Copy parameters that were assigned other memory into the shard."""
        if self._handle._use_orig_params and not self._handle._skip_writeback_check:
            self._handle._writeback_orig_params()

    def reshard(self) -> None:
        """Free the gathered copies."""
        handle = self._handle
        # Before the first forward nothing was gathered.
        if not handle.uses_sharded_strategy or not _list_gathered(handle):
            return
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False
        for copy in _list_gathered(handle):
            copy.untyped_storage().resize_(0)


def _list_gathered(handle: Any) -> list[torch.Tensor]:
    """Return the memory of FSDP1's gathered flat parameter; empty before the first forward."""
    names = ("_full_param_padded", "_full_prec_full_param_padded")
    candidates = (getattr(handle.flat_param, name, None) for name in names)
    return [copy for copy in candidates if copy is not None] if handle.uses_sharded_strategy else []


# The results of `list_flat_parameters`, each with the address of its shard.
_LISTED: weakref.WeakKeyDictionary[Any, tuple[int, list[tuple[Any, str, Any]]]] = (
    weakref.WeakKeyDictionary()
)


def list_handles(module: torch.nn.Module) -> list[Any]:
    """Return the flat parameters of a module's FSDP1 submodules.

    >>> list_handles(torch.nn.Linear(2, 2))
    []
    """
    # If FSDP1 has not been imported, no module uses it. Importing it is slow.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None:
        return []
    parts = (p for p in module.modules() if isinstance(p, fsdp.FullyShardedDataParallel))
    return [part._handle for part in parts if part._handle is not None]


def find_shard(handle: Any) -> torch.Tensor:
    """Return the memory of this rank's range of a flat parameter."""
    flat = handle.flat_param
    # Set by the first forward; until then the flat parameter itself is the shard.
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()


def list_flat_parameters(handle: Any) -> list[tuple[torch.nn.Module, str, Any]]:
    """Return the parameters of a flat parameter: module, name in it, and `(tensor, Layout)`.

    The tensor is a view of the shard, or None without a part on this rank. The layout has the
    ranks of this process's job. Parameters that share a tensor have the same view.

    Raises ShardError for parameters that are not dense, or are also sharded as DTensors.
    """
    shard = find_shard(handle)
    cached = _LISTED.get(handle)
    if cached is not None and cached[0] == shard.data_ptr():
        return cached[1]
    flat = handle.flat_param
    ranks = dist.get_process_group_ranks(handle.process_group)
    is_cut = handle.uses_sharded_strategy
    own = dist.get_rank()
    listed: list[tuple[torch.nn.Module, str, Any]] = []
    views: dict[tuple[int, str], Any] = {}
    ends = accumulate(flat._numels_with_padding, initial=0)
    pads = zip(ends, flat._is_padding_mask, strict=False)
    begins = [begin for begin, is_pad in pads if not is_pad]
    forms = zip(flat._shapes, flat._contiguities, flat._param_extensions, strict=True)
    for (name, part, _), begin, form in zip(flat._param_infos, begins, forms, strict=True):
        shape, is_dense, extension = form
        if not is_dense or extension is not None:
            raise ShardError(
                f"{name} of {type(part).__name__}: FSDP1 has it with strides, or sharded by "
                "DTensors as well, which is not supported; use fully_shard (FSDP2)"
            )
        layout = _lay_out(tuple(shape), begin, shard.numel() if is_cut else 0, tuple(ranks))
        expected = layout.local_shape(own) if own < layout.slots else None
        view = None
        if expected is not None:
            at = max(begin - ranks.index(own) * shard.numel(), 0) if is_cut else begin
            view = shard[at : at + math.prod(expected)].view(expected)
        views[id(part), name] = view, layout
        listed.append((part, name, views[id(part), name]))
    for name, part, _, first_name, first, _ in flat._shared_param_infos:
        listed.append((part, name, views[id(first), first_name]))
    _LISTED[handle] = shard.data_ptr(), listed
    return listed


def partitions_parameters() -> bool:
    """Return whether this process may have parameters partitioned by ZeRO-3."""
    return "deepspeed" in sys.modules


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned a parameter.

    >>> is_partitioned(torch.zeros(2))
    False
    """
    return getattr(parameter, "ds_tensor", None) is not None


def find_partition(parameter: torch.Tensor) -> tuple[torch.Tensor | None, Layout]:
    """Return the part and layout of a parameter partitioned by ZeRO-3.

    Raises ShardError for a partition that is not in memory, or that is quantized.
    """
    part: Any = vars(parameter)["ds_tensor"]
    zero_parameter: Any = parameter
    if part.dtype != parameter.dtype or part.numel() != part.ds_numel:
        raise ShardError(
            f"a parameter of shape {list(zero_parameter.ds_shape)} that ZeRO-3 has quantised or "
            "swapped to a disk, which is not supported; give its elements within deepspeed.zero."
            "GatheredParameters"
        )
    ranks = tuple(dist.get_process_group_ranks(zero_parameter.ds_process_group))
    layout = _lay_out(tuple(zero_parameter.ds_shape), 0, part.numel(), ranks)
    own = dist.get_rank()
    expected = layout.local_shape(own) if own < layout.slots else None
    if expected is None:
        return None, layout
    return part.detach()[: math.prod(expected)].view(expected), layout


@lru_cache(maxsize=4096)
def _lay_out(shape: tuple[int, ...], begin: int, length: int, ranks: tuple[int, ...]) -> Layout:
    """Return the layout of a parameter at `begin` of a flat parameter.

    Each rank has `length` elements of the flat parameter, or all of them if `length` is 0.

    >>> _lay_out((2, 3), 1, 4, (0, 1)).boxes(1)
    (Box(start=(1, 0), stop=(2, 3)),)
    """
    slots = max(ranks) + 1
    count = math.prod(shape)
    if not length or not count:
        return Layout.whole(shape, sorted(ranks), slots)
    ranges = {}
    for number, rank in enumerate(ranks):
        low, high = (min(max(end * length - begin, 0), count) for end in (number, number + 1))
        if low < high:
            ranges[rank] = low, high
    return Layout.flat_ranges(shape, ranges, slots=slots)


def find_storage(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or of its part on this rank; 0 for none.

    >>> find_storage(torch.ones(4)[2:]) == find_storage(torch.empty(0))
    False
    """
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        # Tensors that wrap others have no storage of their own.
        return 0
