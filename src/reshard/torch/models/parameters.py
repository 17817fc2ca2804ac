"""Tensors of a model on one rank, listed with how each is cut.

What a rank lists goes to the other ranks (`rosters`); the tensors stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, ShardError, UsageError
from reshard.layout import Layout
from reshard.megatron.ranks import MegatronGrids
from reshard.recipes.naming import Fusion
from reshard.sharding import ShardingSpec
from reshard.torch.distributed_tensor import sharding_of_dtensor, sharding_of_placements
from reshard.torch.endpoint import FREED, WITH_MEMORY, is_freed, local_of, place_sharding
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.entries import EntryColumns, EntryKind, NameColumns, Shape
from reshard.torch.models.given_columns import GivenColumns, is_marked
from reshard.torch.models.given_models import LaidModel, MegatronModel, Model, chunks_of
from reshard.torch.models.megatron.megatron_parameters import (
    add_attributes,
    cut_members,
    list_parameters,
)
from reshard.torch.models.memory import KnownTensors, LocalTensors
from reshard.torch.models.module_memory import tensors_of
from reshard.torch.models.naming import Naming, fitting, meaning, member_pattern
from reshard.torch.models.rosters import Roster, shift_ranks
from reshard.torch.models.samples import sample_of
from reshard.torch.models.stacks import member_layout, position_of
from reshard.torch.partitioned.partitioned_tensor import PartitionedTensor

_OFFLOADED = (
    " (hooks that offload parameters leave them on meta between forwards; remove the hooks, as "
    "accelerate.hooks.remove_hook_from_submodules does)"
)
# What this process has listed.
_KNOWN = KnownTensors()


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
            found.add_all(model)
    except ReshardError as error:
        found.problems.append(str(error))
    except Exception as error:
        # A function of the user's, such as one that gives names: the other ranks wait for this.
        found.problems.append(f"{type(error).__name__}: {error}")
    if found.known is not None:
        return found.known
    problems, first_rank = tuple(found.problems), found.first_rank
    roster = Roster(found.columns(), names, first_rank, problems, found.unmatched)
    described = None if problems else found.described
    listed = LocalTensors(roster, found.tensors, found.locals, described, found.given)
    _KNOWN.keep(listed)
    return listed


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
        self._shifted: dict[Layout, Layout] = {}
        self._names: list[str] = []
        self._own_names: list[str] = []
        self._local_names: list[str] = []
        self._samples: list[str] = []
        self._kinds: dict[EntryKind, int] = {}
        self._kind_of: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.locals: dict[str, torch.Tensor] = {}
        self.unmatched: tuple[str, ...] = ()
        self.problems: list[str] = []
        # What is listed already, or how it may be known when it is listed again.
        self.known: LocalTensors | None = None
        self.described: object = None
        self.given: GivenColumns | None = None

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
        self._names.append(name)
        self._own_names.append(own_name)
        self._local_names.append(local_name)
        self._samples.append(sample)
        self._kind_of.append(self._number_kind(kind))

    def _number_kind(self, kind: EntryKind) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def add_all(self, model: torch.nn.Module | Mapping[str, Any]) -> None:
        """List the tensors of a model that is not Megatron's."""
        given = dict(tensors_of(model))
        own_names = list(given)
        if isinstance(model, torch.nn.Module) and tuple in set(map(type, given.values())):
            # FSDP1 and ZeRO-3 have ranks of this job, whatever is said of other tensors.
            self.first_rank = self._group.find_offset(0)
        for name in own_names:
            if not isinstance(name, str):
                raise UsageError(f"a tensor named {name!r}; give names that are texts")
        if isinstance(model, LaidModel) and model.own_names:
            called = ((name, model.own_names.get(name, name)) for name in given)
            own_names = [name if name == own else f"{name}, as {own}" for name, own in called]
        meanings: list[tuple[str, Fusion | None]] = [(name, None) for name in given]
        if self._naming is not None:
            meanings = list(map(self._find_name, given))
        values = list(given.values())
        columns = None if self._stacks else _KNOWN.read_columns(values)
        samples = self._takes_samples and columns is not None and columns.have_plain
        if columns is not None and not samples and not self.problems:
            numbers = self._group.numbering, self.first_rank
            looks = columns.numbers, list(columns.looks), columns.meshes
            self.described = own_names, meanings, looks, numbers
            self.known = _KNOWN.find(columns.held, self.described, columns.addresses)
        if self.known is not None:
            return
        if columns is not None and self._add_columns(columns, values, own_names, meanings):
            return
        for value, own_name, meant in zip(values, own_names, meanings, strict=True):
            self._add(value, own_name, *meant)

    def _add_columns(
        self,
        columns: GivenColumns,
        values: Sequence[Any],
        own_names: list[str],
        meanings: Sequence[tuple[str, Fusion | None]],
    ) -> bool:
        """List very many tensors of few kinds; False where each has to be looked at by itself."""
        names, fusions = [name for name, _ in meanings], [fusion for _, fusion in meanings]
        if len(set(names)) < len(names) or columns.have_odd:
            return False
        # 1. Which of them are alike but for their names. Ids are of objects that `meanings` has.
        alike: dict[tuple[int, int], int] = {}
        pairs = zip(columns.numbers, map(id, fusions), strict=True)
        numbers = [alike.setdefault(pair, len(alike)) for pair in pairs]
        # 2. Of each of these the first is described.
        firsts = dict(zip(reversed(numbers), reversed(range(len(numbers))), strict=True))
        kinds = [
            self._describe_kind(own_names[first], values[first], fusions[first])
            for first in map(firsts.__getitem__, range(len(alike)))
        ]
        kind_numbers = list(map(self._number_kind, kinds))
        # 3. What each has of its own.
        self._names, self._own_names = names, own_names
        self._kind_of = [kind_numbers[number] for number in numbers]
        looks = columns.list_looks()
        have_part = [kind.shape is not None for kind in kinds]
        self.tensors = {
            name: tensor
            for name, tensor in zip(names, columns.tensors, strict=True)
            if tensor is not None
        }
        self.locals = {
            name: local.detach() if looks[look].needs_gradient else local
            for name, number, look, local in zip(
                names, numbers, columns.numbers, columns.locals, strict=True
            )
            if local is not None and have_part[number]
        }
        self.given = columns
        if self._takes_samples and columns.have_plain:
            are_plain = [look.cut is None for look in looks]
            self._samples = [
                sample_of(local) if local is not None and are_plain[number] else ""
                for local, number in zip(columns.locals, columns.numbers, strict=True)
            ]
        return True

    def _describe_kind(self, name: str, value: Any, fusion: Fusion | None) -> EntryKind:
        """What a tensor has alike with others; no shape where this rank has no part of it."""
        spec = layout = None
        if isinstance(value, tuple):
            value, given = value
            if given not in self._shifted:
                self._shifted[given] = shift_ranks(given, self.first_rank)
            layout = self._shifted[given]
            if value is None:
                return EntryKind(None, None, layout, fusion=fusion)
        elif isinstance(value, PartitionedTensor):
            spec, layout = self._describe_partitioned(name, value)
            value = value.local
        elif isinstance(value, DTensor):
            spec, layout = self._describe(value)
        has_part = layout is None or self._group.rank in layout.local_shapes
        local = value._local_tensor if isinstance(value, DTensor) else value
        shape = tuple(local.shape) if has_part else None
        return EntryKind(_name_dtype(value.dtype), shape, layout, fusion=fusion, spec=spec)

    def _add(self, given: Any, own_name: str, name: str, fusion: Fusion | None) -> None:
        is_laid = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Layout)
        value = given[0] if is_laid else given
        pattern = member_pattern(name, self._stacks) if self._stacks else None
        if value is None and is_laid:
            kind = self._describe_kind(own_name, given, fusion)
            if pattern is None or kind.layout is None or not kind.layout.ndim:
                self._list(name, own_name, kind)
                return
            # This rank has no part of the stack, and knows its layout.
            for number in range(kind.layout.shape[0]):
                member = pattern.replace("{}", str(number))
                of_member = member_layout(kind.layout, number)
                self._list_member(member, own_name, None, None, of_member)
            return
        if isinstance(value, PartitionedTensor):
            value = value.local
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{own_name!r} is a {type(value).__name__}; give a tensor, or (tensor, Layout)"
            )
        if value is given and is_marked(value):
            self.problems.append(
                f"{own_name}: a part of a tensor, by Megatron's tensor_model_parallel=True, and "
                "not a whole one; give its module as MegatronModel(module, names or groups=...), "
                "or it with its Layout"
            )
        local = self._local(name, value)
        if local is None:
            return
        kind = self._describe_kind(own_name, given, fusion)
        if pattern is not None:
            self._add_members(name, own_name, pattern, value, local, kind.layout)
            return
        self._register(name, value, local, kind.shape is not None)
        sample = sample_of(local) if kind.layout is None and self._takes_samples else ""
        self._list(name, own_name, kind, sample)

    def _describe(self, value: DTensor) -> tuple[ShardingSpec, Layout]:
        """How a DTensor is cut."""
        says = value._spec
        key = says.mesh, says.placements, value.shape, getattr(says, "shard_order", None)
        if key not in self._described:
            spec = place_sharding(sharding_of_dtensor(value), self._group)
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
                + _OFFLOADED * value.is_meta
            )
            return None
        if value.is_conj() or value.is_neg():
            self.problems.append(f"{name}: conjugate or negative; give resolve_conj() of it")
            return None
        # What has its memory itself has nothing to wait for, or to resolve.
        if type(value) in WITH_MEMORY:
            local: torch.Tensor | None = value.detach()
        else:
            try:
                local = local_of(value)
            except ShardError as error:
                self.problems.append(f"{name}: {error}")
                return None
        if type(local) in WITH_MEMORY and is_freed(local):
            self.problems.append(f"{name}: {FREED}")
            return None
        return local

    def _register(
        self, name: str, value: torch.Tensor, local: torch.Tensor, has_part: bool = True
    ) -> None:
        """Keep a tensor, with its memory where that is a part of the whole."""
        self.tensors[name] = value
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


@lru_cache(maxsize=64)
def _name_dtype(dtype: torch.dtype) -> str:
    return as_dtype(dtype).name
