"""Memory of modules: the tensors that a module computes with, as parameters and buffers.

A module's state dict is not always its memory: a hook, or a quantised module, may put copies into
it. So tensors are taken from a module only where they are parameters and buffers of its parts.

A refit reads and writes the tensors that a module had when it was prepared. Code that puts another
parameter in the place of one, such as `module.weight = torch.nn.Parameter(...)`, leaves it with one
that nobody computes with any more. So before each run the slots of modules are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reshard.errors import ShardError, UsageError
from reshard.torch.forward_copies import can_merge, find_copies, find_merged
from reshard.torch.fully_sharded import (
    find_detached,
    find_partition,
    find_shard,
    find_storage,
    is_partitioned,
    list_flat_parameters,
    list_handles,
    partitions_parameters,
)
from reshard.torch.models.given_models import LaidModel, MegatronModel, Model, chunks_of

# What torch calls the state of a module that is no tensor.
_EXTRA_STATE = "_extra_state"
# What torch.compile calls the module inside the one that it gives.
_COMPILED = "_orig_mod."
# What FSDP1 and activation checkpointing call the module inside.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", _COMPILED)
_SHOWN = 4


def tensors_of(model: torch.nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a module, parameters and persistent buffers, or all that a state dict has.

    Of what torch.compile and DistributedDataParallel make, those of the module inside.

    Raises:
        UsageError: neither of them.
        ShardError: a module whose state dict has tensors that are not its memory.

    >>> [name for name, _ in tensors_of(torch.nn.Linear(2, 2))]
    ['weight', 'bias']
    """
    if isinstance(model, torch.nn.Module):
        return iter(_list_memory(_unwrap(model)).items())
    if isinstance(model, Mapping):
        return ((name, v) for name, v in model.items() if not str(name).endswith(_EXTRA_STATE))
    raise UsageError(
        f"a model of type {type(model).__name__}; give a module, a state dict, "
        "{name: (tensor, Layout)}, a MegatronModel, or None"
    )


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of DistributedDataParallel, whose names have no `module.` in front."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return cast(torch.nn.Module, inner)


def _list_memory(module: torch.nn.Module) -> dict[str, Any]:
    """A module's tensors by the names of its state dict, each a parameter or a buffer of its parts.

    Parameters that FSDP1 has in flat ones, or that ZeRO-3 has partitioned, are `(tensor, Layout)`.

    Raises ShardError for tensors of the state dict that are in other memory.
    """
    handles = list_handles(module)
    if handles:
        return _list_flat_memory(module, handles)
    found = {
        name.replace(_COMPILED, ""): value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    if detached := find_detached(module):
        raise ShardError(
            f"{detached}: replaced after FSDP2's first forward, which goes on computing with the "
            "shard that it had; copy into that one (load_state_dict without assign=True)"
        )
    ids = set[int]()
    for part in module.modules():
        ids.update(map(id, part._parameters.values()), map(id, part._buffers.values()))
    odd = {name: value for name, value in found.items() if id(value) not in ids}
    if odd:
        own = {
            id(tensor): tensor
            for part in module.modules()
            for table in (part._parameters, part._buffers)
            for tensor in table.values()
            if tensor is not None
        }
        # A view of a parameter is its memory; the parameter itself counts its writes.
        by_view = {_describe_view(tensor): tensor for tensor in own.values()}
        storages = set(map(find_storage, own.values())) - {0}
        found |= {name: by_view.get(_describe_view(value), value) for name, value in odd.items()}
        copies = [name for name, value in odd.items() if find_storage(value) not in storages]
        if copies:
            shown = ", ".join(copies[:_SHOWN]) + ", ..." * (len(copies) > _SHOWN)
            raise ShardError(
                f"{shown}: in the state dict of {type(module).__name__}, but not its parameters or "
                "buffers: copies that a state dict hook or a quantised module makes, which its "
                "forward does not use. Give the tensors that it uses, by name, in place of the "
                "module, such as dict(module.named_parameters()); of a quantised module, the "
                "module that it was made of"
            )
    listed = found.items() if partitions_parameters() else ()
    for name in [name for name, value in listed if is_partitioned(value)]:
        found[name] = find_partition(found[name])
    return found


def _list_flat_memory(module: torch.nn.Module, handles: Sequence[Any]) -> dict[str, Any]:
    """The same of a module of FSDP1, whose state dict gathers copies."""
    flat = {
        (id(part), name): value
        for handle in handles
        for part, name, value in list_flat_parameters(handle)
    }
    own = {id(handle.flat_param) for handle in handles}
    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        tables = chain(part._parameters.items(), part._buffers.items())
        values: dict[str, Any] = {
            name: tensor
            for name, tensor in tables
            if tensor is not None
            and id(tensor) not in own
            and name not in part._non_persistent_buffers_set
        }
        values |= {name: value for (of, name), value in flat.items() if of == id(part)}
        found |= {_clean_name(f"{path}.{name}" if path else name): v for name, v in values.items()}
    return found


def _clean_name(name: str) -> str:
    """A tensor's name without those of modules that wrap others."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _describe_view(tensor: torch.Tensor) -> object:
    local = getattr(tensor, "_local_tensor", tensor)
    if not find_storage(local):
        return id(tensor)
    where = local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
    return (type(tensor) is DTensor, tuple(tensor.shape), *where)


def modules_of(model: Model) -> list[torch.nn.Module]:
    """The modules that a model is given as; none where it is given as tensors.

    >>> modules_of({"weight": torch.zeros(2)})
    []
    """
    if isinstance(model, MegatronModel):
        return chunks_of(model)
    inside = model.module if isinstance(model, LaidModel) else model
    return [inside] if isinstance(inside, torch.nn.Module) else []


def find_written_copies(model: Model) -> str:
    """Why forwards would not use what is written into a model's tensors; empty where they would."""
    try:
        return next(filter(None, map(find_copies, modules_of(model))), "")
    except UsageError:
        # What is no model is reported where its tensors are listed.
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSlots:
    """Slots: the table of a submodule, the name in it, the tensor that was there, its whole name.

    Shards: what finds that of a flat parameter of FSDP1, or of a partitioned one of ZeRO-3, where
    it was, and a name.
    Tuners: parts that can merge adapters into their weights, by name.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> slots = ModuleSlots.of(module, module.parameters())
    >>> slots.find_replaced()
    ''
    >>> module[0].bias = torch.nn.Parameter(torch.zeros(2))
    >>> slots.find_replaced()
    '0.bias'
    """

    slots: tuple[tuple[dict[str, Any], str, torch.Tensor, str], ...] = ()
    shards: tuple[tuple[Callable[[], torch.Tensor], int, str], ...] = ()
    tuners: tuple[tuple[str, torch.nn.Module], ...] = ()

    @classmethod
    def of(cls, model: Model, used: Iterable[torch.Tensor]) -> ModuleSlots:
        """Those of tensors of a model that are used; none where the model is no module."""
        modules = modules_of(model)
        if not modules:
            return cls()
        chosen = set(map(id, used))
        slots: list[tuple[dict[str, Any], str, torch.Tensor, str]] = []
        tuners: list[tuple[str, torch.nn.Module]] = []
        for path, part in chain.from_iterable(module.named_modules() for module in modules):
            for table in (part._parameters, part._buffers):
                # Scripted modules have tables that cannot be asked for one name.
                for key, tensor in table.items() if isinstance(table, dict) else ():
                    if tensor is not None and id(tensor) in chosen:
                        slots.append((table, key, tensor, f"{path}.{key}" if path else key))
            if can_merge(part):
                tuners.append((path, part))
        found = chain.from_iterable(map(_list_shards, modules))
        shards = tuple((find, find().data_ptr(), name) for find, name in found)
        return cls(tuple(slots), shards, tuple(tuners))

    def find_merged(self, is_target: bool) -> str:
        """Why adapters that are merged now would count twice, or not at all; empty where none."""
        if not self.tuners:
            return ""
        return find_merged(self.tuners, None if is_target else (slot[2] for slot in self.slots))

    def find_replaced(self, may_compute: bool = False) -> str:
        """The name of the first slot that has another tensor; empty where none has.

        A module that may compute at the moment may have what FSDP2 gathered in place of a shard.
        """
        for table, key, tensor, name in self.slots:
            now = table.get(key)
            if now is not tensor and not (may_compute and _is_gathered(now, tensor)):
                return name
        for find, address, name in self.shards:
            if find().data_ptr() != address:
                return name
        return ""


def _list_shards(module: torch.nn.Module) -> Iterator[tuple[Callable[[], torch.Tensor], str]]:
    for handle in list_handles(module):
        name = type(handle._fully_sharded_module).__name__
        yield partial(find_shard, handle), f"the flat parameter of {name}"
    for name, parameter in module.named_parameters() if partitions_parameters() else ():
        if is_partitioned(parameter):
            yield partial(getattr, parameter, "ds_tensor"), name


def _is_gathered(now: object, tensor: torch.Tensor) -> bool:
    """Whether FSDP2 may have put `now` into the place of a sharded parameter while it computes."""
    if type(tensor) is not DTensor or now is None:
        return False
    return not isinstance(now, DTensor) or now._spec != tensor._spec
