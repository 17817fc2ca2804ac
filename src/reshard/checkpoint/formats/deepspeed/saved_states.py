"""The contents of DeepSpeed's files: weights, values of the training, and partitions.

A file is a nested dict (`torch_files`). Its parts are taken by name, each with its type; a part
that is missing or of another type is an error with its path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.formats.deepspeed import SavedFiles
from reshard.checkpoint.formats.deepspeed.flat_buffers import match_expert
from reshard.checkpoint.formats.optimizer_states import match_groups
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues, flatten_state
from reshard.checkpoint.formats.torch_files.pickles import Call, shortened
from reshard.checkpoint.formats.torch_files.reading import read_torch_dict
from reshard.checkpoint.formats.torch_files.values import (
    ArchivedTensor,
    as_sizes,
    explain,
    is_size,
    is_tensor_call,
)
from reshard.errors import FormatError, UnreadableTensorError

Shape = tuple[int, ...]
#: A tensor, or a plain value such as the number of steps.
Kept = ArchivedTensor | int | float

# Parts of a file of weights that describe its structure.
_OWN_PARTS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "checkpoint_parallel_dimensions"),
    *("dp_world_size", "mp_world_size"),
)
# Parts of a partition that are made again for every new number of ranks.
CUT_PARTS = (
    *("base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict"),
    *("fp32_flat_groups", "group_paddings", "param_alignment_paddings", "partition_count"),
    *("param_slice_mappings", "zero_stage", "universal_checkpoint_info", "ds_version"),
    *("ds_zero_partition_groups", "param_groups"),
)


class SavedPart:
    """A part of a file, whose own parts are taken with their type.

    Raises FormatError for a part that is missing or of another type.
    """

    def __init__(self, value: Any, label: str) -> None:
        self.value = value
        self.label = label

    def wrong(self, key: object, value: object, expected: str) -> FormatError:
        """Return the error for a part that is missing or of an unexpected type."""
        what = "is missing" if value is None else f"is a {type(value).__name__}"
        return FormatError(
            f"{self.label}: {shortened(repr(key))} {what}, expected {expected}; the file is "
            "damaged, or of a version of DeepSpeed that is not known"
        )

    def get(self, key: object) -> Any:
        """Return a part, or None."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def take_dict(self, key: object, *, optional: bool = False) -> Mapping[Any, Any]:
        """Return a part that is a dict, or an empty dict if it is optional and absent."""
        value = self.get(key)
        if value is None and optional:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a dict")
        return value

    def take_list(self, key: object, *, optional: bool = False) -> Sequence[Any]:
        """Return a part that is a list or a tuple; if it is optional and absent, an empty tuple."""
        value = self.get(key)
        if value is None and optional:
            return ()
        if not isinstance(value, list | tuple):
            raise self.wrong(key, value, "a list")
        return value

    def within(self, key: object) -> SavedPart:
        """Return a part that is a dict, to ask for its parts."""
        return SavedPart(self.take_dict(key), f"{self.label} {key}")


def read_file(folder: Path, name: str) -> SavedPart:
    """Return a file of `torch.save` that must hold a dict."""
    path = folder / name
    return SavedPart(read_torch_dict(path, "a dict as DeepSpeed saves"), str(path))


def read_tensors(folder: Path, name: str) -> Mapping[str, ArchivedTensor]:
    """Return the tensors of a file that is a state dict: of an expert, or of a layer."""
    part = read_file(folder, name)
    for key, value in part.value.items():
        if is_tensor_call(value):
            raise UnreadableTensorError(f"{part.label}: {key!r} is {explain(value)}")
    return _select_tensors(part.value)


class ModelState(NamedTuple):
    """A file of weights.

    Attributes:
        file: its name.
        module: weights and buffers; weights that stage 3 partitions are empty. None for a
            pipeline, whose layers have their own files.
        groups: the shapes of the parameters of each group in the order of the flat buffers; of each
            sub-group for stage 3.
        frozen: the shapes of the parameters that no optimizer has.
        fragments: their elements, or this rank's part of them.
        shared: the name under which the parameter of another name is saved.
        buffers: the names of buffers.
        ranks: of data parallelism.
        degrees: the numbers of stages and of tensor-parallel ranks, or None.
        optimizer: the state of an optimizer without partitions.
        rest: everything else.
        unreadable: weights of special classes, by name, with the class.
    """

    file: str
    module: Mapping[str, ArchivedTensor] | None
    groups: tuple[Mapping[str, Shape], ...]
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, ArchivedTensor]
    shared: Mapping[str, str]
    buffers: tuple[str, ...]
    ranks: int
    degrees: tuple[int, int] | None
    optimizer: Any
    rest: Mapping[str, Any]
    unreadable: Mapping[str, str]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes of all parameters that an optimizer has."""
        return {name: shape for group in self.groups for name, shape in group.items()}


class Partition(NamedTuple):
    """A file of a rank's optimizer state.

    Attributes:
        file: its name.
        stage: of ZeRO; 0 for the bfloat16 optimizer that partitions without a stage.
        masters: the flat float32 weights of each group of parameters; of sub-groups for stage 3.
        states: the state of each group, of the same or another size.
        ends: the padding at the end of each group's partition, if saved without it.
        counts: the number of ranks over which each group is partitioned.
        paddings: after each parameter of each group, if parameters are aligned.
        hyper: the hyper-parameters of each group, with the numbers of its flat buffers.
        rest: everything else.
    """

    file: str
    stage: int
    masters: tuple[ArchivedTensor, ...]
    states: tuple[Mapping[str, Any], ...]
    ends: tuple[int, ...]
    counts: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    hyper: tuple[Mapping[str, Any], ...]
    rest: Mapping[str, Any]

    def size(self, group: int) -> int:
        """Return the elements of a group's partition, its padding included."""
        return self.masters[group].shape[0] + self.ends[group]


def read_model_state(folder: Path, name: str) -> ModelState:
    """Read a file of weights.

    Raises:
        FormatError: a file that is damaged, or not of DeepSpeed.
    """
    part = read_file(folder, name)
    groups = part.get("param_shapes")
    # Old versions have a dict for a single group.
    groups = [groups] if isinstance(groups, dict) else groups
    if groups is not None and not isinstance(groups, list | tuple):
        raise part.wrong("param_shapes", groups, "a list of dicts")
    module = part.get("module")
    degrees = part.take_dict("checkpoint_parallel_dimensions", optional=True)
    numbers = tuple(degrees.get(key) for key in ("pp_degree", "tp_degree"))
    ranks = part.get("dp_world_size")
    ranks = 1 if ranks is None else ranks
    if not _is_count(ranks):
        raise part.wrong("dp_world_size", ranks, "a number of ranks")
    return ModelState(
        name,
        None if module is None else _tensors(part, "module"),
        tuple(_shapes(part, group) for group in groups or ()),
        _shapes(part, part.take_dict("frozen_param_shapes", optional=True)),
        _tensors(part, "frozen_param_fragments"),
        _names(part, "shared_params"),
        tuple(n for n in part.take_list("buffer_names", optional=True) if isinstance(n, str)),
        ranks,
        numbers if all(_is_count(n) for n in numbers) else None,  # type: ignore[arg-type]
        part.get("optimizer"),
        {key: value for key, value in part.value.items() if key not in _OWN_PARTS},
        {**_unreadable(part, "module"), **_unreadable(part, "frozen_param_fragments")},
    )


def read_partition(folder: Path, name: str) -> Partition:
    """Read a file of a rank's optimizer state.

    Raises:
        FormatError: a file that is damaged, or not of DeepSpeed.
    """
    part = read_file(folder, name).within("optimizer_state_dict")
    stage = _stage(part)
    masters = part.take_list(
        "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    )
    states, hyper = _base_states(part, stage, len(masters))
    counts = part.get("partition_count")
    if isinstance(counts, int):
        counts = [counts] * len(masters)
    if not isinstance(counts, list | tuple) or not all(map(_is_count, counts)):
        raise part.wrong("partition_count", counts, "a number of ranks")
    if len(counts) < len(masters):
        raise part.wrong("partition_count", counts, f"one for each of {len(masters)} groups")
    # Stages 1 and 2 save float32 weights without the padding at their ends, so that another number
    # of ranks can concatenate them; the bfloat16 optimizer, which has no stage, saves the padding.
    stored_paddings = part.take_list("group_paddings", optional=True) if stage in (1, 2) else ()
    paddings = [*stored_paddings] if len(stored_paddings) == len(masters) else [0] * len(masters)
    if not all(map(is_size, paddings)):
        raise part.wrong("group_paddings", stored_paddings, "sizes")
    for number, master in enumerate(masters):
        if (
            not isinstance(master, ArchivedTensor)
            or len(master.shape) != 1
            or master.view.strides not in ((1,), (0,))
        ):
            raise part.wrong(f"group {number}", master, "a flat tensor")
    return Partition(
        name,
        stage,
        tuple(masters),
        tuple(states),
        tuple(paddings),
        tuple(counts),
        _parameter_paddings(part),
        hyper,
        {key: value for key, value in part.value.items() if key not in CUT_PARTS},
    )


def _stage(part: SavedPart) -> int:
    """Return the stage, an enumeration's member or a number, or 0 if absent."""
    stage = part.get("zero_stage")
    if isinstance(stage, Call) and len(stage.arguments) == 1:
        stage = stage.arguments[0]
    if stage is None:
        return 0
    if type(stage) is not int or stage not in (1, 2, 3):
        raise part.wrong("zero_stage", stage, "1, 2 or 3")
    return stage


def _base_states(
    part: SavedPart, stage: int, groups: int
) -> tuple[list[Mapping[str, Any]], tuple[Mapping[str, Any], ...]]:
    """Return the state of each group's flat buffer, and the hyper-parameters of every group."""
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    base = part.get(key)
    if isinstance(base, list | tuple):
        # An elastic checkpoint: a list of states, and the step.
        if len(base) != groups or not all(isinstance(entry, dict) for entry in base):
            raise part.wrong(key, base, f"a dict for each of {groups} groups")
        step = part.get("base_optimizer_state_step")
        extra = {} if step is None else {"step": step}
        elastic: list[Mapping[str, Any]] = [{**extra, **entry} for entry in base]
        return elastic, ()
    # The optimizer that ZeRO wraps has never seen a parameter: its parameters are the flat buffers,
    # which its groups list by number.
    inner = part.within(key)
    hyper = inner.take_list("param_groups")
    numbers: list[Any] = []
    for entry in hyper:
        own = SavedPart(entry, inner.label).take_list("params")
        numbers += own
    if len(numbers) != groups:
        raise inner.wrong("param_groups", hyper, f"{groups} flat buffers, one a group")
    states = inner.take_dict("state")
    ordered: list[Mapping[str, Any]] = []
    for number in numbers:
        state = states.get(number) if type(number) in (int, str) else None
        if state is not None and not isinstance(state, dict):
            raise inner.wrong(number, state, "the state of a flat buffer")
        ordered.append(state or {})
    return ordered, tuple(dict(entry) for entry in hyper)


def _parameter_paddings(part: SavedPart) -> tuple[tuple[int, ...], ...] | None:
    paddings = part.get("param_alignment_paddings")
    if paddings is None:
        return None
    is_list = isinstance(paddings, list) and all(isinstance(group, list) for group in paddings)
    if not is_list or not all(is_size(size) for group in paddings for size in group):
        raise part.wrong("param_alignment_paddings", paddings, "lists of sizes")
    return tuple(tuple(group) for group in paddings)


def _shapes(part: SavedPart, group: object) -> Mapping[str, Shape]:
    if not isinstance(group, dict):
        raise part.wrong("param_shapes", group, "a dict of shapes")
    shapes = {}
    for name, shape in group.items():
        sizes = as_sizes(shape)
        if not isinstance(name, str) or sizes is None:
            raise part.wrong(name, shape, "the shape of a parameter")
        shapes[name] = sizes
    return shapes


def _unreadable(part: SavedPart, key: str) -> Mapping[str, str]:
    """Return the tensors of a dict that are not read, with their class."""
    tensors = part.take_dict(key, optional=True)
    return {str(name): explain(value) for name, value in tensors.items() if is_tensor_call(value)}


def _tensors(part: SavedPart, key: str) -> Mapping[str, ArchivedTensor]:
    """Return the tensors of a dict, without other values such as extra states of modules."""
    return _select_tensors(part.take_dict(key, optional=True))


def _select_tensors(values: Mapping[Any, Any]) -> dict[str, ArchivedTensor]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, ArchivedTensor)
    }


def _names(part: SavedPart, key: str) -> Mapping[str, str]:
    value = part.get(key)
    # Old versions have pairs.
    pairs = value.items() if isinstance(value, dict) else value or ()
    try:
        names = dict(pairs)
    except (TypeError, ValueError):
        raise part.wrong(key, value, "pairs of names") from None
    if not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise part.wrong(key, value, "pairs of names")
    return names


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 22


AddTensor = Callable[[str, str, ArchivedTensor], None]
_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
#: The key of a loss scaler's class.
SCALER_CLASS = "class"


def list_differences(
    first: Mapping[str, Any], other: Mapping[str, Any], file: str
) -> list[tuple[str, str]]:
    """Return the values in which another rank's file differs from the first, with the reason."""
    left, right = flatten_state(first, file), flatten_state(other, file)
    differing = [
        name
        for name in {**left.values, **right.values}
        if repr(left.values.get(name)) != repr(right.values.get(name))
    ]
    for name in {**left.tensors, **right.tensors}:
        a, b = left.tensors.get(name), right.tensors.get(name)
        if a is None or b is None or a.crc32 is None or a.crc32 != b.crc32:
            differing.append(name)
    why = "another than that of rank 0, which is taken"
    return [(f"{name} in {file}", why) for name in differing]


def plain_scalers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with each loss scaler, an object, replaced by a dict of its attributes."""
    plain = dict(state)
    for key, value in state.items():
        is_scaler = isinstance(value, Call) and value.function.module == _LOSS_SCALERS
        if is_scaler and isinstance(value.state, dict):
            plain[key] = {SCALER_CLASS: value.function.name, **value.state}
    return plain


def add_model_values(values: PlainValues, model: ModelState, add_tensor: AddTensor) -> None:
    """Add the values in a file of weights."""
    values.add_state(plain_scalers(model.rest), (), model.file, add_tensor)
    if model.shared:
        values.add("shared_params", dict(model.shared), label=model.file)
    # Empty too: it distinguishes a user's tensors from buffers when the state is written again.
    if model.module is not None:
        values.add("buffer_names", [*model.buffers], label=model.file)
    frozen = [*model.frozen]
    if not frozen and model.groups:
        # Files that do not list the parameters that no optimizer has.
        listed = {*model.shapes, *model.buffers, *model.shared}
        frozen = [name for name in model.module or {} if name not in listed]
    if frozen:
        values.add("frozen_params", frozen, label=model.file)


# The state of optimizers without partitions (stage 0) is in the file of weights; a model with
# experts has a file of each of the experts' ranks, with the state of all its parameters. Each
# stage of a pipeline and each tensor-parallel rank has a file of weights, and so state of its own.
_OPTIMIZER_OWN = frozenset(
    {"state", "param_groups", "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"}
)


class WholeOptimizer(NamedTuple):
    """An optimizer without partitions.

    Attributes:
        file: its name.
        mp: the number of the model-parallel rank that saved it.
        weights: of that rank, in the order of the model.
        states: the optimizer state of each parameter, by its number.
        masters: the float32 weights of parameters, by number.
        flat: the flat float32 weights of each group; numbers then refer to groups.
        hyper: the groups, with the numbers of their parameters.
        rest: other values that are saved with it.
    """

    file: str
    mp: int
    weights: list[tuple[str, Shape]]
    states: Mapping[int, Mapping[Any, Any]]
    masters: Mapping[int, ArchivedTensor]
    flat: tuple[ArchivedTensor, ...]
    hyper: tuple[Mapping[str, Any], ...]
    rest: Mapping[str, Any]

    @property
    def numbers(self) -> list[int]:
        """The numbers of parameters with state."""
        return [*dict.fromkeys([*self.masters, *self.states])]

    def shape(self, number: int) -> Shape | None:
        """Return the shape of a parameter: of its weights, or of its largest state."""
        if number in self.masters:
            return self.masters[number].shape
        shapes = [v.shape for v in self.states.get(number, {}).values() if _is_tensor(v)]
        return max(shapes, key=lambda shape: (len(shape), math.prod(shape)), default=None)


def list_optimizers(
    saved: SavedFiles, models: Mapping[tuple[int, int], ModelState]
) -> Iterator[WholeOptimizer]:
    """Yield the optimizers without partitions of a save.

    Raises:
        FormatError: an optimizer that is not of DeepSpeed.
    """
    for (mp, rank), model in models.items():
        # With experts every rank that has some of them saves its optimizer to `expp_rank_R_...`,
        # and rank 0 once more to the file of weights: read twice, its parameters would be counted
        # as those of two ranks.
        of_experts = any(own == mp for _, own in saved.expert_optimizers)
        if not rank and not of_experts and isinstance(model.optimizer, dict):
            label = str(saved.folder / model.file)
            yield _read_optimizer(model.optimizer, label, model.file, mp, list_weights(model))
    for (rank, mp), name in sorted(saved.expert_optimizers.items()):
        optimizer = read_file(saved.folder, name).get("optimizer")
        if isinstance(optimizer, dict):
            weights = list_local_weights(saved, list_weights(models[mp, 0]), rank, mp)
            yield _read_optimizer(optimizer, str(saved.folder / name), name, mp, weights)


def _read_optimizer(
    optimizer: dict[Any, Any], label: str, file: str, mp: int, weights: list[tuple[str, Shape]]
) -> WholeOptimizer:
    part = SavedPart(optimizer, f"{label} optimizer")
    inner = part if part.get("state") is not None else part.within("optimizer_state_dict")
    groups = inner.take_list("param_groups")
    numbers = []
    for group in groups:
        own = SavedPart(group, inner.label).take_list("params")
        if not all(type(number) is int for number in own):
            raise inner.wrong("params", own, "numbers of parameters")
        numbers.append(own)
    states = inner.take_dict("state")
    masters: dict[int, ArchivedTensor] = {}
    for own, ones in zip(numbers, part.take_list("fp32_groups", optional=True), strict=False):
        if isinstance(ones, list | tuple) and len(ones) == len(own):
            pairs = zip(own, ones, strict=True)
            masters.update((number, tensor) for number, tensor in pairs if _is_tensor(tensor))
    flat = tuple(v for v in part.take_list("fp32_groups_flat", optional=True) if _is_tensor(v))
    return WholeOptimizer(
        file,
        mp,
        weights,
        {n: state for n, state in states.items() if type(n) is int and isinstance(state, dict)},
        masters,
        flat,
        tuple(dict(group) for group in groups),
        {key: value for key, value in part.value.items() if key not in _OPTIMIZER_OWN},
    )


def name_parameters(optimizer: WholeOptimizer) -> dict[int, str] | None:
    """Return the name of each number among the model's weights, or None if shapes are ambiguous."""

    def may_have(index: int, name: str) -> bool:
        # DeepSpeed marks groups of experts with `moe`; PyTorch's own optimizers have no mark.
        is_expert = match_expert(name) is not None
        return bool(optimizer.hyper[index].get("moe", is_expert)) == is_expert

    groups = [group["params"] for group in optimizer.hyper]
    return match_groups(groups, optimizer.shape, optimizer.weights, may_have)


def list_weights(model: ModelState) -> list[tuple[str, Shape]]:
    """Return weights in the order of the model, without buffers and repeated tied weights."""
    # Optimizers have a tied weight once, under its first name: `Module.parameters()` skips others.
    weights, seen = [], set()
    for name, archived in (model.module or {}).items():
        place = (archived.start_bytes, archived.view.offset, archived.shape)
        if name not in model.buffers and not (place in seen and archived.storage_bytes):
            weights.append((name, archived.shape))
        seen.add(place)
    return weights


def _is_tensor(value: object) -> bool:
    return isinstance(value, ArchivedTensor)


def list_local_weights(
    saved: SavedFiles, dense: list[tuple[str, Shape]], rank: int, mp: int
) -> list[tuple[str, Shape]]:
    """Return all weights of an expert-parallel rank in the order of the model, experts after gates.

    `dense` are the weights of all ranks. The experts of a layer are divided evenly over ranks.
    """
    ranks = 1 + max((rank for rank, mp_rank in saved.expert_optimizers if mp_rank == mp), default=0)
    layers: dict[int, list[int]] = {}
    for layer, expert, mp_rank in sorted(saved.experts):
        if mp_rank == mp:
            layers.setdefault(layer, []).append(expert)
    weights = [*dense]
    for layer, numbers in layers.items():
        local = len(numbers) // ranks
        for expert in numbers[rank * local : (rank + 1) * local]:
            tensors = read_tensors(saved.folder, saved.experts[layer, expert, mp])
            for name, archived in tensors.items():
                match = match_expert(name)
                before = match[1].removesuffix("experts.deepspeed_experts.") if match else ""
                places = [
                    i
                    for i, (weight_name, _) in enumerate(weights)
                    if weight_name.startswith(before)
                ]
                at = places[-1] + 1 if places else len(weights)
                weights.insert(at, (name, archived.shape))
    return weights


def name_members(
    groups: Iterable[Mapping[str, Any]], names: Iterable[Iterable[str]]
) -> list[dict[str, Any]]:
    """Return groups with the names of parameters for the numbers of flat buffers.

    >>> name_members([{"lr": 0.1, "params": [0, 1]}, {"params": [2]}], [["a"], ["b", "c"], ["d"]])
    [{'lr': 0.1, 'params': ['a', 'b', 'c']}, {'params': ['d']}]
    """
    named, rest = [], iter(names)
    for group in groups:
        numbers = group.get("params")
        count = len(numbers) if isinstance(numbers, list | tuple) else 0
        members = [name for buffer in itertools.islice(rest, count) for name in buffer]
        named.append({**group, "params": members})
    return named


def merge_groups(merged: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Add another rank's parameters to groups, whose hyper-parameters are equal on all ranks.

    >>> merged = [{"lr": 0.1, "params": ["a"]}]
    >>> merge_groups(merged, [{"lr": 0.1, "params": ["a", "b"]}])
    >>> merged
    [{'lr': 0.1, 'params': ['a', 'b']}]
    """
    for number, group in enumerate(groups):
        if number == len(merged):
            merged.append(group)
            continue
        names = merged[number]["params"]
        seen = {*names}
        names += [name for name in group["params"] if name not in seen]
