"""Models as users give them to a rank, and the tensors of modules.

=============================  ==================================================================
a model on one rank            how its tensors are sharded
a module, a state dict         DTensors by their placements; other tensors are replicated on every
                               rank that has them. Parameters and persistent buffers count
`{name: (tensor, Layout)}`     by the layouts, over the ranks of the model
`{name: PartitionedTensor}`    by its placement, if all ranks know all splits
`MegatronModel`                by the attributes of all ranks' parameters, and by sizes or live
                               process groups (`megatron_models`)
`by_recipe(...)`               by the rules of a recipe
`None`                         the rank has no tensors
=============================  ==================================================================

A module's state dict is not always its memory: a hook or a quantised module may put copies into it.
Tensors are therefore taken from a module only if they are parameters and buffers of its submodules.

A refit reads and writes the tensors that a module had when it was prepared. Code that replaces a
parameter, as `module.weight = torch.nn.Parameter(...)` does, leaves the refit with a tensor that
nothing computes with. The slots of modules are therefore compared before each run.

A module of an inference engine or of a trainer's pipeline stage has plain tensors. A recipe
specifies the layouts of the full tensors (`by_recipe`):

1. the module's own names become the recipe's (`naming`). A fused parameter concatenates its
   members' parts of this rank, as engines build it::

       qkv_proj here    | q q q q | k k | v v |    queries of this rank, keys of this rank, ...

2. if a rank counts its layers and experts from 0, they get their numbers in the full model;
3. each tensor has the recipe's layout. A tensor that is not among the shapes is replicated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reshard.errors import ReshardError, ShardError, UsageError
from reshard.layout import Layout
from reshard.megatron.names import MegatronNames
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.torch import fully_sharded
from reshard.torch.forward_copies import can_merge, find_copies, find_merged
from reshard.torch.models.naming import Naming, resolve_name


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A rank's model chunks, whose parameters carry Megatron's attributes.

    The arrangement of the ranks is given either by sizes (`names`), or by the process groups of the
    job (`groups`).

    Args:
        chunks: a module, or one for each virtual stage of this rank.
        names: the ranks, and how they name their layers and experts; the same on every rank.
        parameters: information that the attributes lack, by local name or pattern: fields of
            `LocalParameter` such as `heads`, `true_length` or `is_expert`.
        groups: this rank's process groups, instead of names: an object or a dictionary with torch's
            groups, or lists of their ranks, as `tp`, `pp`, `ep`, `expt_tp` (or `etp`), `cp`, `dp`,
            `expt_dp` (or `edp`), as far as they exist. Without names and groups, the
            `pg_collection` of the first chunk is used. Groups have global ranks, so no offset is
            added; the layers of all stages are counted.
        stack: the module whose numbered layers are distributed over the pipeline, if groups are
            given.
        config: of the model on the Hub: the content of its config.json, or transformers' object.
            When None, the configs of the modules are used (`megatron_configs`).
        problems: why the model cannot be used on this rank, for all ranks to raise.
    """

    chunks: torch.nn.Module | Sequence[torch.nn.Module]
    names: MegatronNames | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Any = None
    stack: str = "decoder.layers"
    config: Any = None
    problems: tuple[str, ...] = ()


class LayoutModel(dict[str, Any]):
    """`{name: (tensor, Layout)}`, created from a model with other names.

    `module` is the module that it was created from, if any. `own_names` are the model's names if
    they differ. `problems` are errors of this rank: a refit raises them on every rank, since an
    error on a single rank would leave the others waiting. `first_rank` is the rank of this
    process's job that is rank 0 of the layouts.
    """

    def __init__(self, first_rank: int = 0) -> None:
        super().__init__()
        self.first_rank = first_rank
        self.module: torch.nn.Module | None = None
        self.own_names: dict[str, str] = {}
        self.problems: list[str] = []


Model: TypeAlias = "torch.nn.Module | Mapping[str, Any] | MegatronModel | None"


def list_chunks(model: MegatronModel) -> list[torch.nn.Module]:
    """Return a model's chunks."""
    chunks = model.chunks
    if isinstance(chunks, torch.nn.Module):
        return [chunks]
    if not isinstance(chunks, Sequence) or not all(isinstance(c, torch.nn.Module) for c in chunks):
        raise UsageError(f"a MegatronModel of {chunks!r}; give a module, or a list of modules")
    return list(chunks)


# torch's name of module state that is not a tensor.
_EXTRA_STATE = "_extra_state"
# torch.compile's name of the inner module.
_COMPILED = "_orig_mod."
# Names of the inner module in FSDP1 and activation checkpointing.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", _COMPILED)
_SHOWN = 4


def tensors_of(model: torch.nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return an iterator over a module's parameters and persistent buffers, or over a state dict.

    For results of torch.compile and DistributedDataParallel, those of the inner module.

    Raises:
        UsageError: neither a module nor a mapping.
        ShardError: a module whose state dict contains tensors that are not its memory.

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
    """Return the module inside DistributedDataParallel, whose names lack the prefix `module.`."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return cast(torch.nn.Module, inner)


def _list_memory(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's tensors by their state dict names, all of them parameters or buffers.

    Flat parameters of FSDP1 and partitioned parameters of ZeRO-3 are `(tensor, Layout)`.

    Raises ShardError for tensors of the state dict with other memory.
    """
    handles = fully_sharded.list_handles(module)
    if handles:
        return _list_flat_memory(module, handles)
    tensors = {
        name.replace(_COMPILED, ""): value
        # With `keep_vars`, values are the parameters themselves, by which they are recognized.
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    if detached := fully_sharded.find_detached(module):
        raise ShardError(
            f"{detached}: replaced after FSDP2's first forward, which goes on computing with the "
            "shard that it had; copy into that one (load_state_dict without assign=True)"
        )
    ids = set[int]()
    for part in module.modules():
        ids.update(map(id, part._parameters.values()), map(id, part._buffers.values()))
    odd = {name: value for name, value in tensors.items() if id(value) not in ids}
    if odd:
        parameters = {
            id(tensor): tensor
            for part in module.modules()
            for table in (part._parameters, part._buffers)
            for tensor in table.values()
            if tensor is not None
        }
        # A view of a parameter is its memory; the parameter counts writes.
        by_view = {_describe_view(tensor): tensor for tensor in parameters.values()}
        storages = set(map(fully_sharded.find_storage, parameters.values())) - {0}
        tensors |= {name: by_view.get(_describe_view(value), value) for name, value in odd.items()}
        copies = [
            name for name, value in odd.items() if fully_sharded.find_storage(value) not in storages
        ]
        if copies:
            shown = ", ".join(copies[:_SHOWN]) + ", ..." * (len(copies) > _SHOWN)
            raise ShardError(
                f"{shown}: in the state dict of {type(module).__name__}, but not its parameters or "
                "buffers: copies that a state dict hook or a quantised module makes, which its "
                "forward does not use. Give the tensors that it uses, by name, in place of the "
                "module, such as dict(module.named_parameters()); of a quantised module, the "
                "module that it was made of"
            )
    candidates = tensors.items() if fully_sharded.partitions_parameters() else ()
    for name in [name for name, value in candidates if fully_sharded.is_partitioned(value)]:
        tensors[name] = fully_sharded.find_partition(tensors[name])
    return tensors


def _list_flat_memory(module: torch.nn.Module, handles: Sequence[Any]) -> dict[str, Any]:
    """Return the same for a module of FSDP1, whose state dict gathers copies."""
    flat = {
        (id(part), name): value
        for handle in handles
        for part, name, value in fully_sharded.list_flat_parameters(handle)
    }
    flat_ids = {id(handle.flat_param) for handle in handles}
    tensors: dict[str, Any] = {}
    # A module that is used twice has its tensors under both names, as in a state dict.
    for path, part in module.named_modules(remove_duplicate=False):
        tables = chain(part._parameters.items(), part._buffers.items())
        values: dict[str, Any] = {
            name: tensor
            for name, tensor in tables
            if tensor is not None
            and id(tensor) not in flat_ids
            and name not in part._non_persistent_buffers_set
        }
        values |= {name: value for (part_id, name), value in flat.items() if part_id == id(part)}
        tensors |= {
            _clean_name(f"{path}.{name}" if path else name): v for name, v in values.items()
        }
    return tensors


def _clean_name(name: str) -> str:
    """Remove the names of wrapper modules from a tensor's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _describe_view(tensor: torch.Tensor) -> object:
    local = getattr(tensor, "_local_tensor", tensor)
    if not fully_sharded.find_storage(local):
        return id(tensor)
    where = local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
    return (type(tensor) is DTensor, tuple(tensor.shape), *where)


def list_modules(model: Model) -> list[torch.nn.Module]:
    """Return the modules that a model is given as, empty for tensors.

    >>> list_modules({"weight": torch.zeros(2)})
    []
    """
    if isinstance(model, MegatronModel):
        return list_chunks(model)
    module = model.module if isinstance(model, LayoutModel) else model
    return [module] if isinstance(module, torch.nn.Module) else []


def find_written_copies(model: Model) -> str:
    """Return why forwards would not use values written to a model's tensors, or an empty text."""
    try:
        return next(filter(None, map(find_copies, list_modules(model))), "")
    except UsageError:
        # An invalid model is reported when its tensors are listed.
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSlots:
    """The tensors in a module's tables, to detect replacements.

    Slots: the table of a submodule, the name in it, the tensor that was there, its full name.
    Shards: a function that returns the shard of a flat parameter of FSDP1 or a partition of
    ZeRO-3, its address, and a name.
    Tuners: submodules that can merge adapters into their weights, by name.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> slots = ModuleSlots.of(module, module.parameters())
    >>> slots.find_change(is_target=True)
    ''
    >>> module[0].bias = torch.nn.Parameter(torch.zeros(2))
    >>> slots.find_change(is_target=True)[:40]
    'the module has another tensor as 0.bias '
    """

    slots: tuple[tuple[dict[str, Any], str, torch.Tensor, str], ...] = ()
    shards: tuple[tuple[Callable[[], torch.Tensor], int, str], ...] = ()
    tuners: tuple[tuple[str, torch.nn.Module], ...] = ()

    @classmethod
    def of(cls, model: Model, used: Iterable[torch.Tensor]) -> ModuleSlots:
        """Return the slots of a model's used tensors; empty if the model is not a module."""
        modules = list_modules(model)
        if not modules:
            return cls()
        chosen = set(map(id, used))
        slots: list[tuple[dict[str, Any], str, torch.Tensor, str]] = []
        tuners: list[tuple[str, torch.nn.Module]] = []
        for path, part in chain.from_iterable(module.named_modules() for module in modules):
            for table in (part._parameters, part._buffers):
                # Tables of scripted modules cannot be indexed by name.
                for key, tensor in table.items() if isinstance(table, dict) else ():
                    if tensor is not None and id(tensor) in chosen:
                        slots.append((table, key, tensor, f"{path}.{key}" if path else key))
            if can_merge(part):
                tuners.append((path, part))
        shard_getters = chain.from_iterable(map(_list_shards, modules))
        shards = tuple((find, find().data_ptr(), name) for find, name in shard_getters)
        return cls(tuple(slots), shards, tuple(tuners))

    def find_change(self, is_target: bool) -> str:
        """Return why the tensors are not, or not alone, what the module uses; else an empty text.

        Adapters may be merged now, or a tensor may be another. A forward of the source may run, in
        which FSDP2 replaces shards by gathered tensors.
        """
        if self.tuners:
            read = None if is_target else (slot[2] for slot in self.slots)
            if problem := find_merged(self.tuners, read):
                return problem
        replaced = [name for find, address, name in self.shards if find().data_ptr() != address]
        for table, key, tensor, name in self.slots:
            current = table.get(key)
            if current is not tensor and (is_target or not _is_gathered(current, tensor)):
                replaced.insert(0, name)
                break
        if not replaced:
            return ""
        return (
            f"the module has another tensor as {replaced[0]} than when it was prepared; copy into "
            "the one that was there, or prepare again"
        )


def _list_shards(module: torch.nn.Module) -> Iterator[tuple[Callable[[], torch.Tensor], str]]:
    for handle in fully_sharded.list_handles(module):
        name = type(handle._fully_sharded_module).__name__
        yield partial(fully_sharded.find_shard, handle), f"the flat parameter of {name}"
    for name, parameter in (
        module.named_parameters() if fully_sharded.partitions_parameters() else ()
    ):
        if fully_sharded.is_partitioned(parameter):
            yield partial(getattr, parameter, "ds_tensor"), name


def _is_gathered(now: object, tensor: torch.Tensor) -> bool:
    """Return whether FSDP2 may have replaced a sharded parameter by `now` in a forward."""
    if type(tensor) is not DTensor or now is None:
        return False
    return not isinstance(now, DTensor) or now._spec != tensor._spec


def by_recipe(
    model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    mesh: DeviceMesh,
    shapes: Mapping[str, Sequence[int]],
    recipe: Recipe | None = None,
    rules: Sequence[Rule] = (),
    config: Mapping[str, object] | None = None,
    *,
    naming: Naming | None = None,
    counts_from_zero: bool = False,
    first_rank: int = 0,
    allow: Iterable[str] = (),
) -> LayoutModel:
    """Combine the tensors of a model without sharding information with the layouts of a recipe.

    Args:
        model: of this rank, with the parts that the mesh assigns to it. None if it has none.
        mesh: the ranks of the model, with the axes `tp`, `fsdp`, `ep`, `etp`, `pp`, `dp`, as far as
            they exist.
        shapes: of the full tensors, by the recipe's names, for example from an unsharded module on
            the meta device.
        recipe, rules, config: see `reshard.recipes.assignment.assign`.
        naming: maps the model's names to the recipe's, such as `recipe.naming("vllm", config)`.
        counts_from_zero: whether each rank numbers its layers and experts from 0.
        first_rank: the rank of this process's job that is rank 0 of the mesh. The refit then needs
            no offset.
        allow: see `reshard.recipes.assignment.assign`.

    Returns:
        `{name: (tensor, Layout)}`. Errors, such as rules that do not match, or a fused parameter
        whose members are in groups, are in its `problems`: they may occur on one rank only, so the
        refit raises them on all ranks.
    """
    result = LayoutModel(first_rank)
    result.module = model if isinstance(model, torch.nn.Module) else None
    try:
        whole = {name: _shape(name, shape) for name, shape in shapes.items()}
        assignment = assign(whole, mesh, rules, recipe, config, allow=allow)
        rank = dist.get_rank() - first_rank
        _lay(result, model, assignment, naming, counts_from_zero, rank)
    except ReshardError as error:
        result.problems.append(str(error))
    except Exception as error:
        # Report errors of user functions, or an invalid mesh, since the other ranks wait.
        result.problems.append(f"{type(error).__name__}: {error}")
    return result


def _lay(
    result: LayoutModel,
    model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    assignment: Assignment,
    naming: Naming | None,
    counts_from_zero: bool,
    rank: int,
) -> None:
    layouts = assignment.layouts
    names: dict[str, str] = {}
    if counts_from_zero and rank >= 0:
        names = {local: name for name, local in assignment.local_names(rank).items()}
    result.update({name: (None, layout) for name, layout in layouts.items()})
    for own_name, tensor in tensors_of(model) if model is not None else ():
        for local_name, part in _parts(own_name, tensor, naming, names, layouts, rank):
            name = names.get(local_name, local_name)
            if name in layouts and local_name not in names and counts_from_zero:
                # It must not be mistaken for the tensor of this name in the full model.
                name = f"{local_name} of a rank that should have none"
            other = result.own_names.setdefault(name, own_name)
            if other != own_name:
                result.problems.append(
                    f"{name}: the name of two tensors of the model, {other!r} and {own_name!r}"
                )
            result[name] = (part, layouts[name]) if name in layouts else part


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise UsageError(f"shape {shape!r} of {name!r}; give the whole tensor's sizes, from 0 up")
    return sizes


def _parts(
    own_name: str,
    tensor: torch.Tensor,
    naming: Naming | None,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a tensor of the model stands for, by the recipe's names."""
    resolved = resolve_name(own_name, naming)
    if isinstance(resolved, str):
        yield resolved, tensor
        return
    sizes = list(_sizes(resolved, names, layouts, rank, own_name))
    # Split only a tensor that is as long as its members together.
    is_cut = isinstance(tensor, torch.Tensor) and tensor.ndim > resolved.dimension
    if not is_cut or sum(sizes) != tensor.shape[resolved.dimension]:
        # The refit reports the expected name and shape on all ranks.
        yield from ((member, tensor) for member in resolved.members)
        return
    yield from zip(resolved.members, tensor.split(sizes, resolved.dimension), strict=True)


def _sizes(
    fusion: Fusion,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    rank: int,
    own_name: str,
) -> Iterator[int]:
    """Yield the size of each member in a fused tensor of this rank."""
    if fusion.stacked or fusion.transposed:
        raise UsageError(
            f"{own_name!r} is a stack, or has transposed members, {list(fusion.members)}; a module "
            "with a recipe has neither. Give it by names that are not fused"
        )
    if fusion.groups != 1:
        raise UsageError(
            f"{own_name!r} has its members in {fusion.groups} groups; a module with a recipe has "
            "each in one piece. Give this one as MegatronModel, or with its Layout"
        )
    for member in fusion.members:
        layout = layouts.get(names.get(member, member))
        shape = None if layout is None or not 0 <= rank < layout.slots else layout.local_shape(rank)
        yield shape[fusion.dimension] if shape and len(shape) > fusion.dimension else 0
