"""FSDP2's parameters: their shards, and the gathered copies that forwards compute with.

After a forward without a backward, FSDP2 leaves the root's parameters unsharded, and the next
forward uses that copy::

    shards            written by a refit           read by the next all-gather
    unsharded copy    left by the last forward     read by the next forward

Before shards are read or written, the copies made of them are freed. That needs no communication:
the next forward gathers again. All ranks that share the parameters have to do it alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.distributed import _composable_state

# Several refits may run at the same time, each in a thread of its own.
_TURN = threading.Lock()
_IDLE = "IDLE"


def free_gathered(storages: Callable[[], Collection[int]]) -> str:
    """Free the copies that FSDP2 gathered of shards, so that the next forward uses the shards.

    Args:
        storages: returns the addresses of the storages that shards are in; called only where FSDP2
            has a copy of any.

    Returns:
        Why a copy has to stay; empty where none is left.
    """
    stale = [group for group in _list_groups() if _has_copy(group)]
    if not stale:
        return ""
    wanted = storages()
    with _TURN:
        for group in stale:
            if not _has_copy(group) or _storages_of(group).isdisjoint(wanted):
                continue
            if group._training_state.name != _IDLE:
                return (
                    f"FSDP2 computes with {group._module_fqn or 'the root'} "
                    f"({group._training_state.name}); run between a step's forward and backward "
                    "passes, not within them"
                )
            with torch.no_grad():
                # An all-gather under way would be taken for the parameters by the next forward.
                group.wait_for_unshard()
                group.reshard()
    return ""


def _list_groups() -> Iterator[Any]:
    """The parameter groups of all modules of this process that `fully_shard` was applied to."""
    for entry in list(_composable_state._module_state_mapping.values()):
        # Before torch 2.6 the table has the states themselves.
        state: Any = entry() if callable(entry) else entry
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        yield from groups


def _has_copy(group: Any) -> bool:
    return not group.is_sharded or group._all_gather_result is not None


def _storages_of(group: Any) -> set[int]:
    """The addresses of the storages that a group's shards are in."""
    return set(map(find_storage, (one.sharded_param for one in group.fsdp_params))) - {0}


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
