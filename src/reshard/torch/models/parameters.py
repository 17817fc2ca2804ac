"""List the tensors of a model on a rank, with their shardings.

The listing is sent to the other ranks (`model_manifest`); the tensors stay. The members of a
stacked tensor are listed separately, as views of it with their own layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, ShardError, UsageError
from reshard.layout import Layout
from reshard.megatron.ranks import MegatronGrids
from reshard.recipes.naming import Fusion
from reshard.sharding import ShardingSpec
from reshard.torch import endpoint
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models import local_tensors, model_inputs, model_manifest
from reshard.torch.models.megatron_models import add_attributes, cut_members, list_parameters
from reshard.torch.models.naming import Naming, find_entry, member_pattern, resolve_name
from reshard.torch.partitioned_tensor import PartitionedTensor


# The stacks of all layers have equal layouts.
@lru_cache(maxsize=8192)
def find_position(layout: Layout, rank: int, number: int) -> int | None:
    """Return a rank's local position of index `number` of the first dimension, or None.

    >>> find_position(Layout.replicated((4, 2)), 0, 3)
    3
    """
    if rank >= layout.slots or not layout.cells_of(rank):
        return None
    part = int(layout.cell_part[layout.cells_of(rank).start, 0])
    return _position_in_part(layout, part, number)


def _position_in_part(layout: Layout, part: int, number: int) -> int | None:
    for start, stop, local_start, _ in layout.tables[0].runs_of(part):
        if start <= number < stop:
            return int(local_start + number - start)
    return None


@lru_cache(maxsize=8192)
def member_layout(layout: Layout, number: int) -> Layout:
    """Return the layout of a member of a stacked tensor, without the first dimension.

    >>> from reshard.layout import Box
    >>> boxes = [(0, Box((0, 0), (2, 2))), (1, Box((2, 0), (4, 2)))]
    >>> halves = Layout.from_boxes((4, 2), boxes)
    >>> member_layout(halves, 3).holders
    (1,)
    """
    parts = [
        part
        for part in range(layout.tables[0].parts)
        if _position_in_part(layout, part, number) is not None
    ]
    # The cells that hold the member, without their part of the stacked dimension.
    chosen = np.isin(layout.cell_part[:, 0], parts)
    return layout.replace(
        shape=layout.shape[1:],
        tables=layout.tables[1:],
        cell_slot=layout.cell_slot[chosen],
        cell_part=layout.cell_part[chosen, 1:],
        cell_contribution=layout.cell_contribution[chosen],
    )


_OFFLOADED = (
    " (hooks that offload parameters leave them on meta between forwards; remove the hooks, as "
    "accelerate.hooks.remove_hook_from_submodules does)"
)
# Listings of this process.
_KNOWN = local_tensors.ListingCache()


def list_tensors(
    model: model_inputs.Model,
    naming: Naming | None = None,
    stacks: Mapping[str, str] | None = None,
    offset: int | None = None,
    *,
    group: RankGroup,
    takes_samples: bool = False,
) -> local_tensors.LocalTensors:
    """Return this rank's tensors of a model. Problems are stored in the manifest, for all ranks to
    raise.

    Args:
        model: see `model_inputs`.
        naming: from the model's names to common names.
        stacks: patterns of stacked tensors and of their members, in common names.
        offset: the group's number of the rank that is rank 0 of layouts or of Megatron's ranks; by
            default the first of this process's job, or that of the model.
        group: all ranks that take part.
        takes_samples: whether to add samples of plain tensors, for comparison between ranks.
    """
    lister = _Lister(naming, stacks, group, takes_samples)
    names = model.names if isinstance(model, model_inputs.MegatronModel) else None
    try:
        lister.problems += getattr(model, "problems", ())
        if names is None or not isinstance(names.ranks, MegatronGrids):
            # Process groups have the group's rank numbers; other models count from a first rank.
            lister.first_rank = _find_first_rank(model, offset, group)
        if isinstance(model, model_inputs.MegatronModel):
            lister.add_megatron(model)
        elif model is not None:
            lister.add_all(model)
    except ReshardError as error:
        lister.problems.append(str(error))
    except Exception as error:
        # Report errors of user functions, such as naming functions, since the other ranks wait.
        lister.problems.append(f"{type(error).__name__}: {error}")
    if lister.known is not None:
        return lister.known
    problems, first_rank = tuple(lister.problems), lister.first_rank
    manifest = model_manifest.ModelManifest(
        lister.columns(), names, first_rank, problems, lister.unmatched
    )
    described = None if problems else lister.described
    listed = local_tensors.LocalTensors(
        manifest, lister.tensors, lister.locals, described, lister.given
    )
    _KNOWN.keep(listed)
    return listed


def _find_first_rank(model: model_inputs.Model, offset: int | None, group: RankGroup) -> int:
    """Return the group's number of a model's rank 0.

    Raises ShardError if the model contradicts the offset, or there is no such rank.
    """
    counts = isinstance(model, model_inputs.MegatronModel) or (
        isinstance(model, Mapping)
        and any(issubclass(kind, tuple) for kind in set(map(type, model.values())))
    )
    layout_model = model if isinstance(model, model_inputs.LayoutModel) else None
    if not counts or (offset is not None and layout_model is None):
        return offset or 0
    home = layout_model.first_rank if layout_model is not None else 0
    first_rank = home + group.find_offset(home)
    if offset not in (None, first_rank):
        raise ShardError(
            f"an offset of {offset}, but by_recipe has first_rank={home}, which is {first_rank} "
            "of the group; leave the offset out"
        )
    return first_rank


class _Lister:
    """The columns of a manifest, and the tensors of this rank, as they are listed."""

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
        self._kinds: dict[model_manifest.Entry, int] = {}
        self._kind_of: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.locals: dict[str, torch.Tensor] = {}
        self.unmatched: tuple[str, ...] = ()
        self.problems: list[str] = []
        # The cached listing, or the description by which it can be reused.
        self.known: local_tensors.LocalTensors | None = None
        self.described: object = None
        self.given: local_tensors.ParameterColumns | None = None

    def columns(self) -> model_manifest.EntryColumns:
        """Return the listed entries."""
        local_names, samples = (
            column if any(column) else () for column in (self._local_names, self._samples)
        )
        # If own names are the common names, share one list.
        is_own = self._own_names == self._names
        own_names = self._names if is_own else self._own_names
        names = model_manifest.NameColumns(self._names, own_names, local_names)
        return model_manifest.EntryColumns(names, tuple(self._kinds), self._kind_of, samples)

    def _list(
        self,
        name: str,
        own_name: str,
        kind: model_manifest.Entry,
        sample: str = "",
        local_name: str = "",
    ) -> None:
        self._names.append(name)
        self._own_names.append(own_name)
        self._local_names.append(local_name)
        self._samples.append(sample)
        self._kind_of.append(self._kinds.setdefault(kind, len(self._kinds)))

    def add_all(self, model: torch.nn.Module | Mapping[str, Any]) -> None:
        """List the tensors of a model that is not Megatron's."""
        entries = dict(model_inputs.tensors_of(model))
        own_names = list(entries)
        if isinstance(model, torch.nn.Module) and tuple in set(map(type, entries.values())):
            # FSDP1 and ZeRO-3 count the ranks of this job, whatever the offset.
            self.first_rank = self._group.find_offset(0)
        for name in own_names:
            if not isinstance(name, str):
                raise UsageError(f"a tensor named {name!r}; give names that are texts")
        if isinstance(model, model_inputs.LayoutModel) and model.own_names:
            pairs = ((name, model.own_names.get(name, name)) for name in entries)
            own_names = [name if name == own else f"{name}, as {own}" for name, own in pairs]
        meanings: list[tuple[str, Fusion | None]] = [(name, None) for name in entries]
        if self._naming is not None:
            meanings = list(map(self._find_name, entries))
        values = list(entries.values())
        columns = None if self._stacks else _KNOWN.read_columns(values)
        samples = self._takes_samples and columns is not None and columns.have_plain
        if columns is not None and not samples and not self.problems:
            # The same tensors have other layouts in a group that numbers its ranks differently.
            numbers = self._group.numbering, self.first_rank
            signatures = columns.numbers, list(columns.signatures), columns.meshes
            self.described = own_names, meanings, signatures, numbers
            self.known = _KNOWN.find(columns.held, self.described, columns.addresses)
        if self.known is not None:
            return
        if columns is not None and self._add_columns(columns, values, own_names, meanings):
            return
        for value, own_name, meant in zip(values, own_names, meanings, strict=True):
            self._add(value, own_name, *meant)

    def _add_columns(
        self,
        columns: local_tensors.ParameterColumns,
        values: Sequence[Any],
        own_names: list[str],
        meanings: Sequence[tuple[str, Fusion | None]],
    ) -> bool:
        """List many tensors of few kinds; return False if each has to be handled separately."""
        names, fusions = [name for name, _ in meanings], [fusion for _, fusion in meanings]
        # Problems of single tensors are reported by name, which columns cannot do.
        if len(set(names)) < len(names) or columns.have_odd:
            return False
        # 1. Number the kinds. `meanings` keeps the objects alive, so their ids are unique.
        numbers_by_kind: dict[tuple[int, int], int] = {}
        pairs = zip(columns.numbers, map(id, fusions), strict=True)
        numbers = [numbers_by_kind.setdefault(pair, len(numbers_by_kind)) for pair in pairs]
        # 2. Describe the first tensor of each kind.
        # In reverse, so that the first of each kind is kept.
        firsts = dict(zip(reversed(numbers), reversed(range(len(numbers))), strict=True))
        kinds = [
            self._describe_kind(own_names[first], values[first], fusions[first])
            for first in map(firsts.__getitem__, range(len(numbers_by_kind)))
        ]
        kind_numbers = [self._kinds.setdefault(kind, len(self._kinds)) for kind in kinds]
        # 3. Collect the columns of each tensor.
        self._names, self._own_names = names, own_names
        self._kind_of = [kind_numbers[number] for number in numbers]
        signatures = columns.kinds
        have_part = [kind.shape is not None for kind in kinds]
        self.tensors = {
            name: tensor
            for name, tensor in zip(names, columns.tensors, strict=True)
            if tensor is not None
        }
        self.locals = {
            name: local.detach() if signatures[signature].needs_gradient else local
            for name, number, signature, local in zip(
                names, numbers, columns.numbers, columns.locals, strict=True
            )
            if local is not None and have_part[number]
        }
        self.given = columns
        if self._takes_samples and columns.have_plain:
            are_plain = [signature.cut is None for signature in signatures]
            self._samples = [
                local_tensors.sample_digest(local)
                if local is not None and are_plain[number]
                else ""
                for local, number in zip(columns.locals, columns.numbers, strict=True)
            ]
        return True

    def _describe_kind(self, name: str, value: Any, fusion: Fusion | None) -> model_manifest.Entry:
        """Return the kind of a tensor, without a shape if this rank has no part of it."""
        spec = layout = None
        if isinstance(value, tuple):
            value, unshifted = value
            if unshifted not in self._shifted:
                self._shifted[unshifted] = model_manifest.shift_ranks(unshifted, self.first_rank)
            layout = self._shifted[unshifted]
            if value is None:
                return model_manifest.Entry("", None, None, layout, fusion=fusion)
        elif isinstance(value, PartitionedTensor):
            spec, layout = self._describe_partitioned(name, value)
            value = value.local
        elif isinstance(value, DTensor):
            spec, layout = self._describe(value)
        has_part = layout is None or self._group.rank in layout.local_shapes
        local = value._local_tensor if isinstance(value, DTensor) else value
        shape = tuple(local.shape) if has_part else None
        return model_manifest.Entry(
            "", _name_dtype(value.dtype), shape, layout, fusion=fusion, spec=spec
        )

    def _add(self, item: Any, own_name: str, name: str, fusion: Fusion | None) -> None:
        is_laid = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Layout)
        value = item[0] if is_laid else item
        pattern = member_pattern(name, self._stacks) if self._stacks else None
        if value is None and is_laid:
            kind = self._describe_kind(own_name, item, fusion)
            if pattern is None or kind.layout is None or not kind.layout.ndim:
                self._list(name, own_name, kind)
                return
            # This rank knows the layout of the stack, but lacks a part of it.
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
        if value is item and local_tensors.is_marked(value):
            self.problems.append(
                f"{own_name}: a part of a tensor, by Megatron's tensor_model_parallel=True, and "
                "not a whole one; give its module as MegatronModel(module, names or groups=...), "
                "or it with its Layout"
            )
        local = self._local(name, value)
        if local is None:
            return
        kind = self._describe_kind(own_name, item, fusion)
        if pattern is not None:
            self._add_members(name, own_name, pattern, value, local, kind.layout)
            return
        self._register(name, value, local if kind.shape is not None else None)
        sample = (
            local_tensors.sample_digest(local)
            if kind.layout is None and self._takes_samples
            else ""
        )
        self._list(name, own_name, kind, sample)

    def _describe(self, value: DTensor) -> tuple[ShardingSpec, Layout]:
        """Return the sharding of a DTensor."""
        spec_of = value._spec
        key = spec_of.mesh, spec_of.placements, value.shape, getattr(spec_of, "shard_order", None)
        if key not in self._described:
            spec = endpoint.place_sharding(endpoint.sharding_of_dtensor(value), self._group)
            self._described[key] = spec, spec.layout(tuple(value.shape))
        return self._described[key]

    def _describe_partitioned(
        self, name: str, value: PartitionedTensor
    ) -> tuple[ShardingSpec, Layout]:
        """Return the sharding of a partitioned tensor; raise ShardError if this rank lacks it."""
        shape, placement = value.whole_shape, value.placement
        if shape is None or placement is None:
            raise ShardError(
                f"{name!r} is a PartitionedTensor of which each rank knows its own splits only; "
                "give gather_splits() of it, which all its ranks call"
            )
        spec = endpoint.sharding_of_placements(value.mesh, [placement], len(shape))
        spec = endpoint.place_sharding(spec, self._group)
        return spec, spec.layout(shape)

    def _find_name(self, own_name: str) -> tuple[str, Fusion | None]:
        """Return a tensor's common name, and the fusion of its members if it is fused."""
        resolved = resolve_name(own_name, self._naming)
        return (own_name, resolved) if isinstance(resolved, Fusion) else (resolved, None)

    def add_megatron(self, model: model_inputs.MegatronModel) -> None:
        names = model.names
        if names is None:
            raise UsageError("a MegatronModel without names; give them, or let the refit find them")
        if not isinstance(model.parameters, Mapping):
            raise UsageError(f"parameters={model.parameters!r} of a MegatronModel; give a table")
        # The refit reports it if all ranks agree: another stage may have the parameter.
        own_names = [
            name
            for chunk in model_inputs.list_chunks(model)
            for name, _ in model_inputs.tensors_of(chunk)
        ]
        self.unmatched = tuple(
            entry
            for entry in model.parameters
            if not any(find_entry(name, {entry: True}) for name in own_names)
        )
        rank = self._group.rank - self.first_rank
        for number, chunk in enumerate(model_inputs.list_chunks(model)):
            for own_name, value, parameter in list_parameters(chunk, names):
                whole = names.global_name(own_name, rank, number)
                if names.expert(whole) is not None:
                    # Megatron marks experts only if ranks distribute them.
                    parameter = replace(parameter, is_expert=True)
                parameter = add_attributes(
                    own_name, parameter, find_entry(own_name, model.parameters) or {}
                )
                name, fusion = self._find_name(whole)
                local = self._local(name, value)
                if local is None:
                    continue
                if fusion is not None:
                    parameter = cut_members(parameter, fusion)
                self._register(name, value, local)
                shape = tuple(local.shape)
                kind = model_manifest.Entry(
                    "", parameter.dtype, shape, None, parameter, chunk=number, fusion=fusion
                )
                self._list(name, whole, kind, local_name=own_name)

    def _local(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's memory on this rank, or None with a problem if it has none."""
        if value.layout is not torch.strided or value.is_meta:
            self.problems.append(
                f"{name}: a {value.layout} tensor on {value.device}; give one dense and in memory"
                + _OFFLOADED * value.is_meta
            )
            return None
        if value.is_conj() or value.is_neg():
            self.problems.append(f"{name}: conjugate or negative; give resolve_conj() of it")
            return None
        # Plain tensors have nothing to wait for or to resolve.
        if type(value) in endpoint.WITH_MEMORY:
            local: torch.Tensor | None = value.detach()
        else:
            try:
                local = endpoint.local_of(value)
            except ShardError as error:
                self.problems.append(f"{name}: {error}")
                return None
        if local is not None and endpoint.is_freed(local):
            self.problems.append(f"{name}: {endpoint.FREED}")
            return None
        return local

    def _register(self, name: str, value: torch.Tensor, local: torch.Tensor | None) -> None:
        """Store a tensor, with its memory if that is a part of the full tensor."""
        self.tensors[name] = value
        if local is not None:
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
        """List a stacked tensor as its members, which are views with their own layouts."""
        rank = self._group.rank
        dtype = _name_dtype(value.dtype)
        if not value.ndim:
            self.problems.append(f"{name}: a stacked tensor without dimensions")
            return
        if layout is None:
            for number, view in enumerate(local):
                member = pattern.replace("{}", str(number))
                self._register(member, value, view)
                self._list_member(member, own_name, dtype, tuple(view.shape), None)
            return
        expected = layout.local_shapes.get(rank)
        if any(len(layout.cells_of(rank)) != 1 for rank in layout.holders):
            self.problems.append(f"{name}: a stacked tensor whose ranks have several boxes each")
            return
        for number in range(layout.shape[0]):
            member = pattern.replace("{}", str(number))
            layout_of_member = member_layout(layout, number)
            at = find_position(layout, rank, number)
            view = None if at is None or expected != tuple(local.shape) else local[at]
            # A member is written through its stack, whose version autograd counts.
            self._register(member, value, view)
            shape = None if view is None else tuple(view.shape)
            self._list_member(member, own_name, dtype, shape, layout_of_member)

    def _list_member(
        self,
        name: str,
        own_name: str,
        dtype: str | None,
        shape: model_manifest.Shape | None,
        layout: Layout | None,
    ) -> None:
        """List a member of a stack by its common name; it may be fused itself."""
        # A function was applied to the stack's own name, and knows no common names.
        resolved = resolve_name(name, self._naming) if isinstance(self._naming, Mapping) else None
        fusion = resolved if isinstance(resolved, Fusion) else None
        self._list(name, own_name, model_manifest.Entry("", dtype, shape, layout, fusion=fusion))


@lru_cache(maxsize=64)
def _name_dtype(dtype: torch.dtype) -> str:
    return as_dtype(dtype).name
