"""The parts of a source in a new checkpoint of DeepSpeed: groups of parameters, and flat buffers.

Names are canonical: NAME, `optimizer.state.NAME.KEY` with float32 weights under `master`, and the
value `optimizer.param_groups`. The parameters of a group are in the order of the flat buffers,
whose positions a `FlatPlan` has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from reshard._records import Record
from reshard.checkpoint.formats.deepspeed.flat_buffers import (
    GroupCopy,
    deal,
    deal_round_robin,
    flat_pieces,
    match_expert,
    own_pieces,
    parameter_paddings,
    part_size,
    partition_size,
    sub_groups,
)
from reshard.checkpoint.formats.deepspeed.stored_tensors import lay_out
from reshard.checkpoint.formats.optimizer_states import (
    ADAM_GROUP,
    DECOUPLED,
    GROUPS,
    MASTER,
    STEP,
    find_keys,
    split_state_name,
    state_name,
)
from reshard.errors import UsageError
from reshard.geometry.regions import Region
from reshard.layout import Layout
from reshard.recipes.overrides import STATELESS
from reshard.text import count_text, first_text

Shape = tuple[int, ...]
CONFIG = "ds_config"
# How many names an error or a note lists.
MAX_SHOWN = 4
_PARAMS = "params"
# DeepSpeed copies the keys of a universal checkpoint's groups into the optimizer's groups, past
# PyTorch's `load_state_dict`, in which AdamW sets this key itself. The default, False, would make
# AdamW an Adam whose decay is part of the gradient, so new groups leave the key out.
_NEW_GROUP = {key: value for key, value in ADAM_GROUP.items() if key != DECOUPLED}
# Last words of the names of parameters, if the source does not list these.
_PARAMETER_WORDS = ("weight", "bias")


class ParameterGroup(NamedTuple):
    """Parameters that are optimized alike; `hyper` has the hyper-parameters."""

    names: tuple[str, ...]
    hyper: Mapping[str, Any]

    @property
    def is_of_experts(self) -> bool:
        """Whether all of them are experts'."""
        return match_expert(self.names[0]) is not None


class TrainingParts(Record):
    """The parts of a training state.

    Attributes:
        groups: of parameters.
        shapes: of all parameters, in the order of the groups.
        states: the keys of each parameter's state, including `master`.
        weights: parameters with weights in addition to float32 weights.
        buffers: tensors of the module that are not parameters.
        frozen: the shapes of parameters that no optimizer has.
        missing_frozen: frozen parameters that the model has and the source lacks, as far as known.
        stateless: parameters that a group of the source lists, with weights and without state.
        is_sure: whether the source lists the frozen parameters and buffers.
        shared: second names of parameters, with their first names.
        others: tensors of a user's state.
        notes: for the user.
    """

    groups: tuple[ParameterGroup, ...]
    shapes: Mapping[str, Shape]
    states: Mapping[str, tuple[str, ...]]
    weights: tuple[str, ...]
    buffers: tuple[str, ...]
    frozen: Mapping[str, Shape]
    shared: Mapping[str, str]
    others: tuple[str, ...]
    is_sure: bool
    notes: tuple[str, ...] = ()
    missing_frozen: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()

    @property
    def are_frozen_listed(self) -> bool:
        """Whether files of weights list the frozen parameters.

        DeepSpeed looks up every frozen parameter of its model in the list, unless the list is None.
        """
        return self.is_sure and bool(self.frozen) and not self.missing_frozen

    def expect_all_frozen(self) -> None:
        """Raise UsageError if a part of the frozen parameters is missing.

        DeepSpeed's stage 3 loads all of them or none, and ends in a KeyError elsewhere.
        """
        if self.frozen and self.missing_frozen:
            raise UsageError(
                f"the source has {count_text(len(self.frozen), 'frozen parameter')} "
                f"({first_text([*self.frozen], MAX_SHOWN)}) and lacks "
                f"{len(self.missing_frozen)} ({first_text(self.missing_frozen, MAX_SHOWN)}): "
                "DeepSpeed's stage 3 loads all of them or none. Give a source with all of them, or "
                "leave out those that are present (--exclude), and load with "
                "load_module_strict=False"
            )

    def expect_state(self, allow: Collection[str]) -> None:
        """Raise UsageError if a parameter in a group lacks state, unless that is allowed.

        Without its state, no stage of DeepSpeed loads the checkpoint into a model that trains it.
        """
        if self.stateless and STATELESS not in allow:
            raise UsageError(
                f"{count_text(len(self.stateless), 'parameter')} "
                f"({first_text(self.stateless, MAX_SHOWN)}) in a group of the source "
                f"{'has' if len(self.stateless) == 1 else 'have'} no optimizer state, without "
                "which DeepSpeed cannot resume if the model trains them: train a step in which "
                "they have gradients, zeros suffice, and save again. If they are frozen: "
                f"--allow {STATELESS}, in Python allow=['{STATELESS}']"
            )

    def expect_equal_states(self, plain: Mapping[str, Collection[str]]) -> None:
        """Raise UsageError if a parameter lacks a part of the state that others of its group have.

        DeepSpeed would go on from zeros, or refuse the folder of the parameter. `plain` has the
        keys of each parameter's state that are not tensors.
        """
        for group in self.groups:
            first: dict[frozenset[str], str] = {}
            for name in group.names:
                # Float32 weights that a source lacks are copies of the weights.
                keys = {*self.states[name], *plain.get(name, ())} - {MASTER}
                first.setdefault(frozenset(keys), name)
            for (own, name), (more, other) in itertools.permutations(first.items(), 2):
                if own < more:
                    key = min(more - own)
                    raise UsageError(
                        f"optimizer state of {name!r} has no {key}, unlike that of {other!r} in "
                        "the same group: DeepSpeed cannot resume from it. Give a source with all "
                        f"of it, or leave it out for all parameters with --exclude '*.{key}'"
                    )

    @property
    def experts(self) -> tuple[str, ...]:
        """The parameters of experts, which DeepSpeed has in files of their own."""
        return tuple(name for group in self.groups if group.is_of_experts for name in group.names)

    def expect_no_experts(self, target: str) -> None:
        """Raise UsageError for experts, which DeepSpeed does not store in such checkpoints."""
        if self.experts:
            raise UsageError(
                f"{self.experts[0]!r} is an expert's: DeepSpeed's MoE layers have no {target}. "
                "Choose deepspeed-zero1, whose stages 1 and 2 have experts"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the state of all parameters, except float32 weights."""
        distinct = dict.fromkeys(key for keys in self.states.values() for key in keys)
        return tuple(key for key in distinct if key != MASTER)


def find_parts(shapes: Mapping[str, Shape], values: Mapping[str, Any]) -> TrainingParts:
    """Return the parts of a checkpoint with tensors of `shapes` and these `values`.

    Raises:
        UsageError: no optimizer state, or none with float32 weights; groups that name other
            parameters, or experts together with others.
    """
    states = _find_states(shapes)
    parameters = {name: shapes[state_name(name, MASTER)] for name in states}
    notes: list[str] = []
    groups = _find_groups(values, parameters, notes)
    ordered = {name: parameters[name] for group in groups for name in group.names}
    shared = values.get("shared_params")
    shared = {a: b for a, b in shared.items() if b in ordered} if isinstance(shared, dict) else {}
    # Sources of DeepSpeed list buffers; in others, names distinguish them.
    placed = {*ordered, *shared}
    rest = [n for n in shapes if split_state_name(n) is None and n not in placed]
    buffers, frozen, others = _sort_rest(rest, values, shapes, notes)
    named = [*_named_frozen(values), *_list_adapted(ordered)] if frozen else _named_frozen(values)
    listed = _list_group_members(values)
    return TrainingParts(
        groups,
        ordered,
        states,
        tuple(name for name in ordered if name in shapes),
        buffers,
        {name: shapes[name] for name in frozen},
        shared,
        others,
        isinstance(values.get("buffer_names"), list),
        tuple(notes),
        tuple(name for name in dict.fromkeys(named) if name not in {*shapes, *placed}),
        tuple(name for name in listed if name in shapes and name not in placed),
    )


def _find_states(shapes: Mapping[str, Shape]) -> dict[str, tuple[str, ...]]:
    states = find_keys(shapes)
    if not states:
        hint = ""
        if any(".state." in name for name in shapes):
            hint = "; give --training reshard, which names optimizer state of other programs so"
        raise UsageError(
            "there is no optimizer state (optimizer.state.NAME.exp_avg) in the source, which "
            f"DeepSpeed's checkpoints of ZeRO are made of{hint}. Weights alone are loaded from "
            "safetensors"
        )
    without = [name for name, keys in states.items() if MASTER not in keys]
    if without and all(name.isdigit() for name in without):
        raise UsageError(
            f"optimizer state of {count_text(len(without), 'parameter')} has numbers for names "
            f"(optimizer.state.{without[0]}), and shapes do not identify the parameters; "
            "DeepSpeed's checkpoints need their names. Save it with "
            "torch.distributed.checkpoint.state_dict.get_state_dict, which has names"
        )
    if without:
        raise UsageError(
            f"{count_text(len(without), 'parameter')} (first: {without[0]}) have optimizer state, "
            f"and neither weights nor float32 ones ({state_name(without[0], MASTER)}), which "
            "DeepSpeed goes on from"
        )
    return states


def _find_groups(
    values: Mapping[str, Any], parameters: Mapping[str, Shape], notes: list[str]
) -> tuple[ParameterGroup, ...]:
    described = values.get(GROUPS)
    groups: list[ParameterGroup] = []
    if isinstance(described, list):
        for group in described:
            names = group.get(_PARAMS) if isinstance(group, dict) else None
            if not isinstance(names, list):
                raise UsageError(
                    f"{GROUPS} of the source has {group!r}, expected a dict with the names "
                    "of parameters"
                )
            hyper = {key: value for key, value in group.items() if key != _PARAMS}
            if not hyper:
                hyper = dict(_NEW_GROUP)
                notes.append(
                    f"group {len(groups)} of the source has no hyper-parameters: it has those of "
                    "AdamW of PyTorch, lr 0.001"
                )
            groups.append(ParameterGroup(tuple(n for n in names if n in parameters), hyper))
    named = {name for group in groups for name in group.names}
    if len(named) != sum(len(group.names) for group in groups):
        raise UsageError(f"{GROUPS} of the source has a parameter in two groups")
    rest = tuple(name for name in parameters if name not in named)
    if rest:
        hyper = {**_NEW_GROUP, **(groups[0].hyper if groups else {})}
        groups.append(ParameterGroup(rest, hyper))
        notes.append(
            f"{count_text(len(rest), 'parameter')} (first: {rest[0]}) are in no group of the "
            f"source; they become one group, with the hyper-parameters of "
            f"{'the first' if len(groups) > 1 else 'AdamW of PyTorch, lr 0.001'}"
        )
    # DeepSpeed removes groups without parameters, and counts groups by position.
    filled = tuple(group for group in groups if group.names)
    for group in filled:
        other = [name for name in group.names if bool(match_expert(name)) != group.is_of_experts]
        if other:
            raise UsageError(
                f"a group of {GROUPS} of the source has {group.names[0]!r} and {other[0]!r}; "
                "DeepSpeed wants experts in groups of their own"
            )
    return filled


def _named_frozen(values: Mapping[str, Any]) -> list[str]:
    """Return the frozen parameters that a reader of DeepSpeed's files names."""
    names = values.get("frozen_params")
    return [*names] if isinstance(names, list) else []


def _list_adapted(trained: Iterable[str]) -> list[str]:
    """Return the frozen weights that PEFT's adapters of these names add to.

    >>> _list_adapted(["q.lora_A.default.weight", "q.lora_B.default.weight"])
    ['q.base_layer.weight']
    """
    modules = (name.partition(".lora_A.") for name in trained)
    return [f"{module}.base_layer.weight" for module, word, _ in modules if word]


def _list_group_members(values: Mapping[str, Any]) -> list[str]:
    groups = values.get(GROUPS)
    members = [
        name
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict)
        for name in group.get(_PARAMS) or ()
    ]
    return [name for name in dict.fromkeys(members) if isinstance(name, str)]


def _sort_rest(
    rest: list[str], values: Mapping[str, Any], shapes: Mapping[str, Shape], notes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the buffers, the frozen parameters and the tensors of a user's state."""
    buffer_names = values.get("buffer_names")
    if isinstance(buffer_names, list):
        of_frozen = {*_named_frozen(values)}
        buffers = tuple(name for name in rest if name in {*buffer_names})
        frozen = tuple(name for name in rest if name in of_frozen)
        return buffers, frozen, tuple(n for n in rest if n not in {*buffers, *frozen})
    frozen = tuple(
        name
        for name in rest
        if name.rpartition(".")[2] in _PARAMETER_WORDS and 0 not in shapes[name]
    )
    buffers = tuple(name for name in rest if name not in frozen)
    if frozen:
        notes.append(
            f"{count_text(len(frozen), 'tensor')} without optimizer state (first: {frozen[0]}) are "
            "taken for frozen parameters, by their names; a model that trains them, or that has "
            "other frozen ones under stage 3, cannot load this"
        )
    return buffers, frozen, ()


# DeepSpeed's default of `sub_group_size`: its stage 3 steps through sub-groups, so that only the
# state of one of them has to be in the memory of the GPU.
_DEFAULT_SUB_GROUP = 10**9


class FlatPlan(Record):
    """The flat buffers of all ranks.

    Attributes:
        ranks: their number.
        copies: for each buffer, the ranks with the same parameters, and these in order: all ranks,
            except for experts. A buffer of stage 3 belongs to a sub-group.
        owners: the group of hyper-parameters of each buffer.
        sizes: elements of each buffer, padding included.
        pieces: of each parameter.
        paddings: after each parameter of each buffer.
    """

    ranks: int
    copies: tuple[tuple[GroupCopy, ...], ...]
    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: Mapping[str, tuple[Region, ...]]
    paddings: tuple[tuple[int, ...], ...]

    @cached_property
    def by_rank(self) -> tuple[Mapping[str, Region], ...]:
        """The piece of each parameter that each rank has."""
        by_rank: list[dict[str, Region]] = [{} for _ in range(self.ranks)]
        for name, pieces in self.pieces.items():
            for piece in pieces:
                by_rank[piece.container][name] = piece
        return tuple(by_rank)

    def copy(self, buffer: int, rank: int) -> GroupCopy:
        """Return the copy of a buffer on a rank."""
        return next(copy for copy in self.copies[buffer] if rank in copy.ranks)

    def names(self, buffer: int, rank: int) -> tuple[str, ...]:
        """Return the parameters of a rank's buffer, in its order."""
        return self.copy(buffer, rank).names

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks that have a part of each parameter's buffer."""
        group_copies = [copy for copies in self.copies for copy in copies]
        return {name: copy.ranks for copy in group_copies for name in copy.names}

    def used(self, buffer: int, rank: int, shapes: Mapping[str, Shape]) -> int:
        """Return the elements of a rank's buffer before its final padding, stages 1 and 2."""
        copy = self.copy(buffer, rank)
        own = sum(math.prod(shapes[name]) for name in copy.names)
        total = own + sum(self.paddings[buffer])
        before = copy.ranks.index(rank) * self.sizes[buffer]
        return min(max(total - before, 0), self.sizes[buffer])


def plan_flat(
    parts: TrainingParts,
    ranks: int,
    sets: Sequence[tuple[int, ...]],
    zero: Mapping[str, Any],
    itemsize_bytes: int,
) -> FlatPlan:
    """Return the partitions of stages 1 and 2; `sets` are the ranks with the same experts.

    `zero` is the configuration of ZeRO.

    Raises:
        UsageError: experts that the ranks cannot share out evenly.
    """
    copies, sizes, paddings = [], [], []
    pieces: dict[str, tuple[Region, ...]] = {}
    everyone = tuple(range(ranks))
    for group in parts.groups:
        if group.is_of_experts:
            dealt = deal(group.names, sets)
        else:
            dealt = (GroupCopy(everyone, group.names),)
        size, padding, of_group = 0, [], []
        for copy in dealt:
            own, holders = [*copy.names], copy.ranks
            if zero.get("round_robin_gradients"):
                own = [own[number] for number in deal_round_robin(len(own), len(holders))]
            elements = [math.prod(parts.shapes[name]) for name in own]
            padding = [0] * len(own)
            if zero.get("parameter_alignment"):
                padding = parameter_paddings(elements, itemsize_bytes)
            size = partition_size(sum(elements) + sum(padding), len(holders))
            for name, flat in zip(own, flat_pieces(elements, padding, size), strict=True):
                pieces[name] = tuple(
                    piece._replace(container=holders[piece.container]) for piece in flat
                )
            of_group.append(GroupCopy(holders, tuple(own)))
        copies.append(tuple(of_group))
        sizes.append(size)
        paddings.append(tuple(padding))
    owners = tuple(range(len(parts.groups)))
    return FlatPlan(ranks, tuple(copies), owners, tuple(sizes), pieces, tuple(paddings))


def plan_own(parts: TrainingParts, ranks: int, zero: Mapping[str, Any]) -> FlatPlan:
    """Return the partitions of stage 3: sub-groups of at most `sub_group_size` elements a rank."""
    limit = zero.get("sub_group_size", _DEFAULT_SUB_GROUP)
    # Configurations often have 1e9, which JSON reads as a float.
    if not isinstance(limit, int | float) or limit <= 0:
        limit = _DEFAULT_SUB_GROUP
    everyone = tuple(range(ranks))
    copies: list[tuple[GroupCopy, ...]] = []
    owners, sizes = [], []
    pieces: dict[str, tuple[Region, ...]] = {}
    for number, group in enumerate(parts.groups):
        elements = [math.prod(parts.shapes[name]) for name in group.names]
        for members in sub_groups([part_size(element, ranks) for element in elements], int(limit)):
            offset = 0
            for member in members:
                pieces[group.names[member]] = own_pieces(elements[member], ranks, offset)
                offset += part_size(elements[member], ranks)
            copies.append((GroupCopy(everyone, tuple(group.names[index] for index in members)),))
            owners.append(number)
            sizes.append(offset)
    paddings = tuple((0,) * len(copy.names) for (copy,) in copies)
    return FlatPlan(ranks, tuple(copies), tuple(owners), tuple(sizes), pieces, paddings)


def place_parts(
    parts: TrainingParts, plan: FlatPlan, shapes: Mapping[str, Shape], *, is_stage3: bool
) -> dict[str, Layout]:
    """Return the layout of every tensor: flat pieces, or whole on the ranks whose files have it.

    Raises:
        UsageError: state that is neither a number nor of its parameter's shape.
    """
    # Every rank has a file of weights under stage 3, and rank 0 alone elsewhere.
    holders = range(plan.ranks) if is_stage3 else range(1)
    layouts: dict[str, Layout] = {}
    for name, shape in shapes.items():
        if (split := split_state_name(name)) is not None:
            layouts[name] = _place_state(*split, shape, parts, plan)
        elif name in parts.frozen and is_stage3:
            layouts[name] = _lay_out_pieces(
                shape, own_pieces(math.prod(shape), plan.ranks, 0), plan
            )
        elif name in parts.shapes or name in parts.shared:
            layouts[name] = Layout.whole(shape, [0], plan.ranks)
        else:
            layouts[name] = Layout.whole(shape, holders, plan.ranks)
    return layouts


def _place_state(
    parameter: str, key: str, shape: Shape, parts: TrainingParts, plan: FlatPlan
) -> Layout:
    if is_flat(key, shape, parts.shapes[parameter]):
        return _lay_out_pieces(shape, plan.pieces[parameter], plan)
    if math.prod(shape) != 1:
        raise UsageError(
            f"{state_name(parameter, key)!r} has shape {list(shape)}, and "
            f"{state_name(parameter, MASTER)} {list(parts.shapes[parameter])}: ZeRO cuts state of "
            "its parameter's shape, and keeps numbers; --exclude it, or choose the format torch-dcp"
        )
    return Layout.whole(shape, plan.holders[parameter], plan.ranks)


def is_flat(key: str, shape: Shape, parameter: Shape) -> bool:
    """Return whether state of a key lies in flat buffers as its parameter does."""
    return key != STEP and shape == parameter


def _lay_out_pieces(shape: Shape, pieces: tuple[Region, ...], plan: FlatPlan) -> Layout:
    ranges = tuple((piece.container, piece.start[0], piece.stop[0]) for piece in pieces)
    return lay_out(shape, ranges, plan.ranks)
