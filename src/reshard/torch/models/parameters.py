"""Tensors of a model on one rank, and how each is known to be cut.

=============================  ==================================================================
a model on one rank            how its tensors are cut
a module, a state dict         DTensors as they say; other tensors are whole on every rank that
                               has them. Parameters and persistent buffers count
`{name: (tensor, Layout)}`     as the layouts say, over the ranks of the model
`{name: PartitionedTensor}`    as its placement says, where all ranks know all splits
`MegatronModel`                as Megatron's attributes of all ranks together say, which are where
                               sizes or live process groups say (`megatron_groups`)
`by_recipe(...)`               as the rules of a recipe cut the whole tensors (`recipe_models`)
`None`                         the rank has nothing
=============================  ==================================================================

What a rank lists goes to the other ranks (`rosters`); the tensors stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, ShardError, UsageError
from reshard.layout import Layout
from reshard.megatron.groups import MegatronGrids
from reshard.megatron.names import MegatronNames
from reshard.notation.objects import sharding_of
from reshard.recipes.fusion import Fusion
from reshard.sharding import ShardingSpec
from reshard.torch.distributed_tensor import sharding_of_placements
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.entries import EntryColumns, EntryKind, NameColumns, Shape
from reshard.torch.models.megatron_parameters import (
    add_attributes,
    cut_members,
    list_parameters,
)
from reshard.torch.models.naming import Naming, fitting, meaning, member_pattern
from reshard.torch.models.rosters import Roster, shift_ranks
from reshard.torch.models.samples import sample_of
from reshard.torch.models.stacks import member_layout, position_of
from reshard.torch.models.states import tensors_of
from reshard.torch.partitioned.partitioned_tensor import PartitionedTensor
from reshard.torch.sides import WITH_MEMORY, list_addresses, local_of, place_sharding


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A rank's model chunks, whose parameters carry Megatron's attributes.

    Where the ranks are among each other, either `names` say by sizes, or `groups` by what runs.

    Args:
        chunks: a module, or one for each virtual stage of this rank.
        names: the ranks, and how they name their layers and experts; the same on every rank.
        parameters: what the attributes leave out, by local name or pattern: fields of
            `LocalParameter` such as `heads`, `true_length` or `is_expert`.
        groups: this rank's process groups, in place of names: an object or a table with those of
            torch, or lists of their ranks, as `tp`, `pp`, `ep`, `expt_tp` (or `etp`), `cp`, `dp`,
            `expt_dp` (or `edp`), as far as there are any. Without either, the `pg_collection` that
            the first chunk has. They have global ranks, so no offset counts; the layers of all
            stages are counted.
        stack: the module whose numbered layers the pipeline shares out, where groups are given.
        config: of the model on the Hub: the content of its config.json, or transformers' object.
            The modules' own config says what they have where this is None (`megatron_configs`).
        problems: why it cannot be used on this rank, for all ranks to raise.
    """

    chunks: torch.nn.Module | Sequence[torch.nn.Module]
    names: MegatronNames | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Any = None
    stack: str = "decoder.layers"
    config: Any = None
    problems: tuple[str, ...] = ()


class LaidModel(dict[str, Any]):
    """`{name: (tensor, Layout)}`, made of a model of other names.

    `own_names` are the model's, where they differ. `problems` are why it cannot be used on this
    rank: a refit raises them on every rank, where an error of one would let the others wait.
    `first_rank` is the rank of this process's job that the layouts call 0.
    """

    def __init__(self, first_rank: int = 0) -> None:
        super().__init__()
        self.first_rank = first_rank
        self.own_names: dict[str, str] = {}
        self.problems: list[str] = []


# What a tensor with a layout says of its kind: type, local shape, layout, members, sharding.
_Says: TypeAlias = tuple[
    torch.dtype | None, torch.Size | None, Layout | None, Fusion | None, ShardingSpec | None
]

Model: TypeAlias = "torch.nn.Module | Mapping[str, Any] | MegatronModel | None"


@dataclass(slots=True)
class LocalTensors:
    """A rank's tensors by common name, and what it tells the others of them.

    `tensors` are the objects that the model has, `locals` their memory on this rank.
    """

    roster: Roster
    tensors: dict[str, torch.Tensor]
    locals: dict[str, torch.Tensor]
    addresses: dict[str, int]

    def moved(self) -> Iterator[tuple[str, int]]:
        """Tensors whose memory is another than when they were listed, with where it was."""
        now = list_addresses(self.tensors.values())
        # Of very many tensors none has moved, nearly always.
        if now != list(self.addresses.values()):
            for (name, address), found in zip(self.addresses.items(), now, strict=True):
                if found != address:
                    yield name, address


def list_tensors(
    model: Model,
    naming: Naming | None = None,
    stacks: Mapping[str, str] | None = None,
    offset: int | None = None,
    *,
    group: RankGroup,
    takes_samples: bool = False,
) -> LocalTensors:
    """What this rank has of a model. Problems are put into the roster, for all ranks to raise.

    Args:
        model: see above.
        naming: from the model's names to common ones.
        stacks: patterns of stacked tensors and of their members, in common names.
        offset: the group's number of the rank that layouts, or Megatron's ranks, call 0; None for
            the first of this process's job, or the one that the model says.
        group: of all ranks that take part.
        takes_samples: whether to say some of what plain tensors have, so that others can compare.
    """
    found = _Lister(naming, stacks, group, takes_samples)
    names = model.names if isinstance(model, MegatronModel) else None
    try:
        found.problems += getattr(model, "problems", ())
        if names is None or not isinstance(names.ranks, MegatronGrids):
            # Process groups have the group's numbers already; others count from a first rank.
            found.first_rank = _find_first_rank(model, offset, group)
        if isinstance(model, MegatronModel):
            found.add_megatron(model)
        elif model is not None:
            own_names = model.own_names if isinstance(model, LaidModel) else {}
            for name, value in tensors_of(model):
                found.add(name, value, own_names.get(name, name))
    except ReshardError as error:
        found.problems.append(str(error))
    except Exception as error:
        # A function of the user's, such as one that gives names: the other ranks wait for this.
        found.problems.append(f"{type(error).__name__}: {error}")
    problems, first_rank = tuple(found.problems), found.first_rank
    roster = Roster(found.columns(), names, first_rank, problems, found.unmatched)
    return LocalTensors(roster, found.tensors, found.locals, found.addresses)


def _find_first_rank(model: Model, offset: int | None, group: RankGroup) -> int:
    """The group's number of the rank that a model calls 0.

    Raises ShardError where the model says another than the offset, or none can be.
    """
    counts = isinstance(model, MegatronModel) or (
        isinstance(model, Mapping)
        and any(issubclass(kind, tuple) for kind in set(map(type, model.values())))
    )
    laid = model if isinstance(model, LaidModel) else None
    if not counts or (offset is not None and laid is None):
        return offset or 0
    home = laid.first_rank if laid is not None else 0
    found = home + group.find_offset(home)
    if offset not in (None, found):
        raise ShardError(
            f"an offset of {offset}, but by_recipe has first_rank={home}, which is {found} of the "
            "group; leave the offset out"
        )
    return found


class _Lister:
    def __init__(
        self,
        naming: Naming | None,
        stacks: Mapping[str, str] | None,
        group: RankGroup,
        takes_samples: bool,
    ) -> None:
        self._takes_samples = takes_samples
        self._naming = naming
        self._stacks = stacks
        self._group = group
        self.first_rank = 0
        self._described: dict[Any, tuple[ShardingSpec, Layout]] = {}
        # The kind of a DTensor and whether this rank has a part, by what it is found by.
        self._distributed: dict[Any, tuple[int, bool, object]] = {}
        self._shifted: dict[Layout, Layout] = {}
        self._names: list[str] = []
        self._own_names: list[str] = []
        self._local_names: list[str] = []
        self._samples: list[str] = []
        self._kinds: dict[EntryKind, int] = {}
        # Tensors with layouts are of few kinds, which are found by what they differ in.
        self._kind_numbers: dict[_Says, int] = {}
        self._kind_of: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.locals: dict[str, torch.Tensor] = {}
        self.addresses: dict[str, int] = {}
        self.unmatched: tuple[str, ...] = ()
        self.problems: list[str] = []

    def columns(self) -> EntryColumns:
        """What was listed."""
        local_names, samples = (
            column if any(column) else () for column in (self._local_names, self._samples)
        )
        # Where a model calls its tensors by their common names, there is one list of them.
        is_own = self._own_names == self._names
        own_names = self._names if is_own else self._own_names
        names = NameColumns(self._names, own_names, local_names)
        return EntryColumns(names, tuple(self._kinds), self._kind_of, samples)

    def _list(
        self, name: str, own_name: str, kind: EntryKind, sample: str = "", local_name: str = ""
    ) -> None:
        number = self._kinds.setdefault(kind, len(self._kinds))
        self._append(name, own_name, number, sample, local_name)

    def _number_kind(self, says: _Says) -> int:
        number = self._kind_numbers.get(says)
        if number is None:
            dtype, shape, layout, fusion, spec = says
            kind = EntryKind(
                None if dtype is None else _name_dtype(dtype),
                None if shape is None else tuple(shape),
                layout,
                fusion=fusion,
                spec=spec,
            )
            number = self._kind_numbers[says] = self._kinds.setdefault(kind, len(self._kinds))
        return number

    def _append(
        self, name: str, own_name: str, number: int, sample: str = "", local_name: str = ""
    ) -> None:
        self._names.append(name)
        self._own_names.append(own_name)
        self._local_names.append(local_name)
        self._samples.append(sample)
        self._kind_of.append(number)

    def add(self, given_name: str, value: Any, model_name: str) -> None:
        name, fusion = given_name, None
        if self._naming is not None:
            name, fusion = self._find_name(given_name)
        own_name = given_name if model_name == given_name else f"{given_name}, as {model_name}"
        layout: Layout | None = None
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Layout):
            value, given = value
            if given not in self._shifted:
                self._shifted[given] = shift_ranks(given, self.first_rank)
            layout = self._shifted[given]
        # This rank has no part of the tensor, and knows its layout.
        pattern = member_pattern(name, self._stacks) if self._stacks else None
        if value is None and layout is not None:
            if pattern is not None and layout.ndim:
                for number in range(layout.shape[0]):
                    member = pattern.replace("{}", str(number))
                    of_member = member_layout(layout, number)
                    self._list_member(member, own_name, None, None, of_member)
                return
            self._append(name, own_name, self._number_kind((None, None, layout, fusion, None)))
            return
        spec: ShardingSpec | None = None
        if isinstance(value, PartitionedTensor):
            spec, layout = self._describe_partitioned(given_name, value)
            value = value.local
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{given_name!r} is a {type(value).__name__}; give a tensor, or (tensor, Layout)"
            )
        if layout is None and getattr(value, "tensor_model_parallel", False):
            self.problems.append(
                f"{given_name}: a part of a tensor, by Megatron's tensor_model_parallel=True, and "
                "not a whole one; give its module as MegatronModel(module, names or groups=...), "
                "or it with its Layout"
            )
        local = self._local(name, value)
        if local is None:
            return
        is_distributed = layout is None and isinstance(value, DTensor)
        if pattern is not None:
            its_layout = self._describe(value)[1] if is_distributed else layout
            self._add_members(name, own_name, pattern, value, local, its_layout)
            return
        if is_distributed:
            self._list_distributed(name, own_name, value, local, fusion)
            return
        has_part = layout is None or self._group.rank in layout.local_shapes
        self._register(name, value, local, has_part)
        sample = sample_of(local) if layout is None and self._takes_samples else ""
        says = (value.dtype, local.shape if has_part else None, layout, fusion, spec)
        self._append(name, own_name, self._number_kind(says), sample)

    def _list_distributed(
        self, name: str, own_name: str, value: DTensor, local: torch.Tensor, fusion: Fusion | None
    ) -> None:
        """List a DTensor. Layers are cut alike, so that is worked out once for all."""
        says = value._spec
        # Torch's own hashes of meshes and placements take longer than all else of a tensor.
        places = map(_identify_placement, says.placements)
        order = getattr(says, "shard_order", None)
        key = id(says.mesh), *places, value.shape, order, value.dtype, local.shape, id(fusion)
        known = self._distributed.get(key)
        if known is None:
            spec, layout = self._describe(value)
            has_part = self._group.rank in layout.local_shapes
            kind = (value.dtype, local.shape if has_part else None, layout, fusion, spec)
            # Kept with what the key has by its identity, which so stays the only one.
            known = self._distributed[key] = self._number_kind(kind), has_part, (says.mesh, fusion)
        self._append(name, own_name, known[0])
        self._register(name, value, local, known[1])

    def _describe(self, value: DTensor) -> tuple[ShardingSpec, Layout]:
        """How a DTensor is cut."""
        says = value._spec
        key = says.mesh, says.placements, value.shape, getattr(says, "shard_order", None)
        if key not in self._described:
            spec = place_sharding(sharding_of(value), self._group)
            self._described[key] = spec, spec.layout(tuple(value.shape))
        return self._described[key]

    def _describe_partitioned(
        self, name: str, value: PartitionedTensor
    ) -> tuple[ShardingSpec, Layout]:
        """How a tensor of partitions is cut. Raises ShardError where this rank does not know it."""
        shape, placement = value.whole_shape, value.placement
        if shape is None or placement is None:
            raise ShardError(
                f"{name!r} is a PartitionedTensor of which each rank knows its own splits only; "
                "give gather_splits() of it, which all its ranks call"
            )
        spec = sharding_of_placements(value.mesh, [placement], len(shape))
        spec = place_sharding(spec, self._group)
        return spec, spec.layout(shape)

    def _find_name(self, own_name: str) -> tuple[str, Fusion | None]:
        """A tensor's common name, and how its members lie in it where it is fused."""
        found = meaning(own_name, self._naming)
        return (own_name, found) if isinstance(found, Fusion) else (found, None)

    def add_megatron(self, model: MegatronModel) -> None:
        names = model.names
        if names is None:
            raise UsageError("a MegatronModel without names; give them, or let the refit find them")
        if not isinstance(model.parameters, Mapping):
            raise UsageError(f"parameters={model.parameters!r} of a MegatronModel; give a table")
        # Reported by the refit if it is so on all ranks: another stage may have the parameter.
        own_names = [name for chunk in chunks_of(model) for name, _ in tensors_of(chunk)]
        self.unmatched = tuple(
            entry
            for entry in model.parameters
            if not any(fitting(name, {entry: True}) for name in own_names)
        )
        rank = self._group.rank - self.first_rank
        for number, chunk in enumerate(chunks_of(model)):
            for own_name, value, parameter in list_parameters(chunk, names):
                whole = names.global_name(own_name, rank, number)
                if names.expert(whole) is not None:
                    # Megatron marks them only where ranks share the experts between them.
                    parameter = replace(parameter, is_expert=True)
                parameter = add_attributes(
                    own_name, parameter, fitting(own_name, model.parameters) or {}
                )
                name, fusion = self._find_name(whole)
                local = self._local(name, value)
                if local is None:
                    continue
                if fusion is not None:
                    parameter = cut_members(parameter, fusion)
                self._register(name, value, local)
                shape = tuple(local.shape)
                kind = EntryKind(parameter.dtype, shape, None, parameter, number, fusion)
                self._list(name, whole, kind, local_name=own_name)

    def _local(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """A tensor's memory here; None, and a problem, where it has none of its own."""
        if value.layout is not torch.strided or value.is_meta:
            self.problems.append(
                f"{name}: a {value.layout} tensor on {value.device}; give one dense and in memory"
            )
            return None
        if value.is_conj() or value.is_neg():
            self.problems.append(f"{name}: conjugate or negative; give resolve_conj() of it")
            return None
        # What has its memory itself has nothing to wait for, or to resolve.
        return value.detach() if type(value) in WITH_MEMORY else local_of(value)

    def _register(
        self, name: str, value: torch.Tensor, local: torch.Tensor, has_part: bool = True
    ) -> None:
        """Keep a tensor, with its memory where that is a part of the whole."""
        self.tensors[name] = value
        self.addresses[name] = local.data_ptr()
        if has_part:
            self.locals[name] = local

    def _add_members(
        self,
        name: str,
        own_name: str,
        pattern: str,
        value: torch.Tensor,
        local: torch.Tensor,
        layout: Layout | None,
    ) -> None:
        """A stacked tensor as its members: each is a layout of its own, and a view of it here."""
        rank = self._group.rank
        dtype = _name_dtype(value.dtype)
        if not value.ndim:
            self.problems.append(f"{name}: a stacked tensor without dimensions")
            return
        if layout is None:
            for number, view in enumerate(local):
                member = pattern.replace("{}", str(number))
                self._register_member(member, value, local, view)
                self._list_member(member, own_name, dtype, tuple(view.shape), None)
            return
        expected = layout.local_shapes.get(rank)
        if any(len(layout.cells_of(rank)) != 1 for rank in layout.holders):
            self.problems.append(f"{name}: a stacked tensor whose ranks have several boxes each")
            return
        for number in range(layout.shape[0]):
            member = pattern.replace("{}", str(number))
            its_layout = member_layout(layout, number)
            at = position_of(layout, rank, number)
            view = None if at is None or expected != tuple(local.shape) else local[at]
            self._register_member(member, value, local, view)
            shape = None if view is None else tuple(view.shape)
            self._list_member(member, own_name, dtype, shape, its_layout)

    def _register_member(
        self, name: str, value: torch.Tensor, whole: torch.Tensor, view: torch.Tensor | None
    ) -> None:
        """A member is where its stack is."""
        self._register(name, value, whole, has_part=False)
        if view is not None:
            self.locals[name] = view

    def _list_member(
        self,
        name: str,
        own_name: str,
        dtype: str | None,
        shape: Shape | None,
        layout: Layout | None,
    ) -> None:
        """A member of a stack has its common name, and may be fused itself."""
        found = meaning(name, self._naming) if isinstance(self._naming, Mapping) else None
        fusion = found if isinstance(found, Fusion) else None
        self._list(name, own_name, EntryKind(dtype, shape, layout, fusion=fusion))


def _identify_placement(placement: Placement) -> object:
    if type(placement) is Shard:
        return placement.dim
    return None if type(placement) is Replicate else placement


@lru_cache(maxsize=64)
def _name_dtype(dtype: torch.dtype) -> str:
    return as_dtype(dtype).name


def chunks_of(model: MegatronModel) -> list[torch.nn.Module]:
    """A model's chunks."""
    given = model.chunks
    if isinstance(given, torch.nn.Module):
        return [given]
    if not isinstance(given, Sequence) or not all(isinstance(c, torch.nn.Module) for c in given):
        raise UsageError(f"a MegatronModel of {given!r}; give a module, or a list of modules")
    return list(given)
