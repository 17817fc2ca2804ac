"""The state of Megatron's checkpoints without tensors: arguments, steps, parameter groups.

It is a nested state: `common.pt` of `torch_dist`, and a part of each rank's file elsewhere::

    args               a Namespace of arguments          args.num_layers, args.hidden_size, ...
    iteration          a number                          iteration
    optimizer          {"optimizer": {"param_groups"}}   optimizer.param_groups, with names
    opt_param_scheduler                                  opt_param_scheduler.num_steps, ...

1. Plain values are named by their paths; dtypes among the arguments become text
   (`torch.bfloat16`).
2. The groups of all optimizers of a chain are a single list. Megatron assigns parameters to groups
   by their kind (experts, vectors and biases, embeddings), and so does this module.
3. The loss scaler of 16-bit gradients is a value; in the files its scale is a tensor.
4. Other objects are listed, and never instantiated.

`nest_values` is the inverse.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard.checkpoint.contents import StoredItem
from reshard.checkpoint.formats.megatron.modules import is_expert
from reshard.checkpoint.formats.optimizer_states import (
    GROUPS,
    MASTER,
    STEP,
    split_state_name,
    state_name,
)
from reshard.checkpoint.formats.torch_files.building import NewStorage, NewTensor
from reshard.checkpoint.formats.torch_files.nested_states import (
    PlainValues,
    StatePath,
    settle_paths,
    unflatten_state,
)
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.checkpoint.formats.torch_files.reading import read_torch_value
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain, plain_attributes
from reshard.checkpoint.formats.write_plan import NewCheckpoint, PlannedTensor
from reshard.dtypes import dtype
from reshard.errors import FormatError
from reshard.text import count_text

# The step of an optimizer that has it in the state of its parameters, and not in groups.
COMMON_STEP = "optimizer.common_step"

# The loss scaler of 16-bit gradients.
_SCALER, _SCALE = "grad_scaler", "scale"
SCALER = f"optimizer.{_SCALER}"
_FLOAT32 = dtype("float32")
_NAMESPACE = Global("argparse", "Namespace")
_TYPE = re.compile(r"torch\.((?:b?float|u?int|complex)\d+|bool|float8_\w+)")

# Parts of an optimizer's state that are tensors or groups.
_OPTIMIZER_PARTS = frozenset(
    {
        *("optimizer", "param_state", "param_state_sharding_type", "state", "param_groups"),
        *("fp32_from_fp16_params", "fp32_from_fp16"),
    }
)
ReadStorage = Callable[[ArchivedTensor], bytes]

PARALLELISM = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size",
}

# Values that files contain by default. Without a version Megatron assumes 0, and reorders queries,
# keys and values as if the file were of before version 2.
DEFAULTS: Mapping[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
EXTRA_STATE = "._extra_state/"

# The marks that distinguish the groups of a Megatron optimizer: it pairs a file's groups with its
# own by them, whatever their order.
GROUP_MARKS = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
}


def add_state(plain: PlainValues, path: StatePath, value: Any, label: str = "the state") -> None:
    """Add a part of a nested state, with Namespaces as dicts; `label` names its file in errors.

    Raises FormatError for a state that is too deep.
    """
    plain.add_state(_without_namespaces(value), path, label)


def add_optimizer(plain: PlainValues, state: Any, read: ReadStorage | None = None) -> None:
    """Add the state of an optimizer, or of a chain of them, without its tensors.

    `read` returns the storage of a small tensor in it. Groups have no parameters until
    `set_groups`.
    """
    plain_groups = plain.values.setdefault(GROUPS, [])
    for optimizer in chain_of(state):
        inner = optimizer.get("optimizer", optimizer)
        if not isinstance(inner, dict):
            plain.unread.append(("optimizer", explain(inner)))
            continue
        groups = inner.get("param_groups")
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, dict):
                plain_groups.append(
                    plain_attributes({k: v for k, v in group.items() if type(k) is str})
                )
        common = inner.get("state")
        if isinstance(common, dict) and "common_step" in common:
            step = common["common_step"]
            plain.values[COMMON_STEP] = step if isinstance(step, int | float) else None
            for group in plain_groups:
                group.setdefault("step", plain.values[COMMON_STEP])
        for key, value in optimizer.items():
            if key == _SCALER:
                _add_scaler(plain, value, read)
            elif key not in _OPTIMIZER_PARTS:
                add_state(plain, ("optimizer", key), value)


def _add_scaler(plain: PlainValues, state: Any, read: ReadStorage | None) -> None:
    """Add a loss scaler, which the optimizers of a chain share."""
    if isinstance(state, dict):
        state = dict(state)
        scale = state.get(_SCALE)
        is_number = isinstance(scale, ArchivedTensor) and math.prod(scale.shape) == 1
        if is_number and scale.dtype is _FLOAT32 and read is not None:
            content = np.frombuffer(read(scale), scale.dtype.numpy)
            state[_SCALE] = float(content[scale.view.offset])
    present = {name: plain.values[name] for name in plain.values if name.startswith(SCALER)}
    scaler = PlainValues()
    add_state(scaler, ("optimizer", _SCALER), state)
    if present != scaler.values or not present:
        add_state(plain, ("optimizer", _SCALER), state)


def set_groups(plain: PlainValues, parameters: Mapping[str, tuple[int, ...]]) -> str | None:
    """Assign parameters to groups by name and shape; return a note if that is ambiguous."""
    groups = plain.values.pop(GROUPS, None)
    if not groups:
        return None
    members: list[list[str]] = [[] for _ in groups]
    unknown = []
    for name, shape in sorted(parameters.items()):
        numbers = find_groups(groups, name, shape)
        if len(numbers) == 1:
            members[numbers[0]].append(name)
        else:
            unknown.append(name)
    for group, names in zip(groups, members, strict=True):
        group["params"] = names
    plain.values[GROUPS] = groups
    if not unknown:
        return None
    return (
        f"the groups of {len(unknown)} parameters are ambiguous (first: {unknown[0]}); "
        f"{GROUPS} has the groups without them"
    )


def scaler_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scaler among plain values as in an optimizer's state, or an empty dict.

    >>> [*scaler_state({"optimizer.grad_scaler.growth_tracker": 3})["grad_scaler"]]
    ['growth_tracker']
    """
    if SCALER in values:
        # A scaler with a constant scale is stateless.
        return {_SCALER: values[SCALER]}
    scaler = {
        name.removeprefix(f"{SCALER}."): value
        for name, value in values.items()
        if name.startswith(f"{SCALER}.")
    }
    scale = scaler.get(_SCALE)
    if isinstance(scale, int | float):
        content = struct.pack("<f", scale)
        scaler[_SCALE] = NewTensor.of(_FLOAT32, (1,), NewStorage(_FLOAT32, 1, content))
    return {_SCALER: scaler} if scaler else {}


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments among plain values, by their own names.

    >>> arguments_of({"args.num_layers": 2, "iteration": 5})
    {'num_layers': 2}
    """
    return {n.removeprefix("args."): v for n, v in values.items() if n.startswith("args.")}


def groups_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizer's groups among plain values."""
    groups = values.get(GROUPS)
    return (
        [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    )


def step_of(values: Mapping[str, Any]) -> Any:
    """Return the number of steps of the first group that has it, or None."""
    return next((group["step"] for group in groups_of(values) if "step" in group), None)


def held_values(new: NewCheckpoint) -> dict[str, Any]:
    """Return the plain values that Megatron's files store; of an optimizer only its own."""
    has_optimizer = any(split_state_name(name) for name in new.tensors)
    own = (GROUPS, COMMON_STEP, SCALER, f"{SCALER}.")
    return {
        name: value
        for name, value in new.values.items()
        if not name.startswith("optimizer.") or (has_optimizer and name.startswith(own))
    }


def without_steps(new: NewCheckpoint) -> NewCheckpoint:
    """Return the contents without steps of parameters: Megatron's groups have them."""
    keys = {name: split_state_name(name) for name in new.tensors}
    steps = {name for name, split in keys.items() if split is not None and split[1] == STEP}
    tensors = {name: tensor for name, tensor in new.tensors.items() if name not in steps}
    return dataclasses.replace(new, tensors=tensors)


def _without_namespaces(value: Any, depth: int = 4) -> Any:
    """Replace Namespaces in a value by dicts."""
    if isinstance(value, Call) and value.function == _NAMESPACE and isinstance(value.state, dict):
        value = value.state
    if type(value) is dict and depth:
        return {key: _without_namespaces(inner, depth - 1) for key, inner in value.items()}
    return value


def chain_of(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of the optimizers in a chain, or of a single optimizer."""
    if isinstance(state, list | tuple):
        members: Sequence[Any] = state
    # `sharded_state_dict` of a chain has the optimizers by number, `state_dict` has a list.
    elif isinstance(state, dict) and state and all(type(key) is int for key in state):
        members = [state[key] for key in sorted(state)]
    else:
        members = [state]
    for member in members:
        if isinstance(member, dict):
            yield member


def has_stacked_experts(arguments: Mapping[str, Any]) -> bool:
    """Return whether a layer's experts are a single weight (`GroupedMLP`), by the arguments."""
    is_local = arguments.get("transformer_impl") == "local"
    is_stacked = is_local or bool(arguments.get("moe_use_legacy_grouped_gemm"))
    return bool(arguments.get("moe_grouped_gemm")) and is_stacked


def find_groups(
    groups: Sequence[Mapping[str, Any]], name: str, shape: tuple[int, ...]
) -> list[int]:
    """Return the numbers of the groups that a parameter can be in."""
    numbers = [*range(len(groups))]
    marks = {
        "is_expert_parallel": is_expert(name),
        "is_decoupled_lr": name.startswith(("embedding.", "output_layer.")),
    }
    for mark, is_so in marks.items():
        if any(groups[n].get(mark) for n in numbers):
            numbers = [n for n in numbers if bool(groups[n].get(mark)) == is_so]
    is_decayed = _decays(name, shape)
    if any(groups[n].get("wd_mult", groups[n].get("pre_wd_mult")) == 0 for n in numbers):
        numbers = [
            n
            for n in numbers
            if (groups[n].get("wd_mult", groups[n].get("pre_wd_mult")) != 0) == is_decayed
        ]
    return numbers


def describe_decay(
    values: Mapping[str, Any], tensors: Mapping[str, PlannedTensor]
) -> tuple[str, ...]:
    """Return notes on parameters whose weight decay changes by Megatron's rule."""
    differing = {True: list[str](), False: list[str]()}
    for group in groups_of(values):
        decay, names = group.get("weight_decay"), group.get("params")
        if not isinstance(decay, int | float) or not isinstance(names, list):
            continue
        is_decayed = bool(decay) and group.get("wd_mult", group.get("pre_wd_mult", 1.0)) != 0
        for name in names:
            tensor = tensors.get(name) or tensors.get(state_name(str(name), MASTER))
            if tensor is not None and _decays(name, tensor.layout.shape) != is_decayed:
                differing[is_decayed].append(name)
    if not differing[True] and not any(group.get("weight_decay") for group in groups_of(values)):
        # Without weight decay, it does not matter which group a parameter is in.
        return ()
    rule = "Megatron decays matrices, and neither vectors nor biases"
    return tuple(
        f"{rule}: {count_text(len(changed), 'parameter')} (first: {changed[0]}) "
        + ("had weight decay and goes on without" if had else "had no weight decay and gets it")
        for had, changed in differing.items()
        if changed
    )


def _decays(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and not name.endswith(".bias")


def optimizer_state(values: Mapping[str, Any], *, of_experts: bool) -> dict[str, Any]:
    """Return the state of a Megatron optimizer without tensors: its groups, and its loss scaler."""
    groups = split_groups(values, of_experts=of_experts)
    return {"optimizer": {"param_groups": groups}, **scaler_state(values)}


def split_groups(values: Mapping[str, Any], *, of_experts: bool) -> list[dict[str, Any]]:
    """Return the groups of a Megatron optimizer, with its marks and without names.

    Groups of other programs do not have marks; each results in a group with weight decay and a
    group without, since Megatron separates vectors and biases from the rest.
    """
    by_marks: dict[tuple[Any, ...], dict[str, Any]] = {}
    groups, step = groups_of(values), step_of(values)
    # Groups of a kind of parameters may be needed for the other kind: own groups come first.
    for flips in (False, True):
        for group in groups:
            own = {key: value for key, value in group.items() if key != "params"}
            if step is not None:
                own.setdefault("step", step)
            decay = own.get("wd_mult", own.get("pre_wd_mult"))
            for wd_mult in [1.0, 0.0] if decay is None else [decay]:
                # In the order that the group has; comparisons see it.
                new = {**own, "wd_mult": wd_mult}
                for mark, usual in GROUP_MARKS.items():
                    new.setdefault(mark, usual)
                new["is_expert_parallel"] = bool(new["is_expert_parallel"]) != flips
                by_marks.setdefault(tuple(new[mark] for mark in GROUP_MARKS), new)
        chosen = [kind for kind in by_marks.values() if kind["is_expert_parallel"] == of_experts]
        if chosen:
            return chosen
    return []


def nest_values(
    values: Mapping[str, Any], paths: Mapping[str, StatePath], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the nested state of plain values but the optimizer's, with Megatron's defaults.

    Arguments are in a Namespace, with the `sizes` of the target's axes.
    """
    values = {name: value for name, value in values.items() if not name.startswith("optimizer.")}
    values = with_parallelism(values, sizes)
    default_paths = {name: paths.get(name) or tuple(name.split(".")) for name in values}
    state: dict[str, Any] = unflatten_state(values, settle_paths(values, default_paths))
    arguments = state.get("args")
    if isinstance(arguments, dict):
        own = {key: _as_type(value) for key, value in arguments.items()}
        state["args"] = Call(_NAMESPACE, (), own, is_new=True)
    return {**state, **{name: value for name, value in DEFAULTS.items() if name not in state}}


def is_own_value(name: str, value: Any) -> bool:
    """Return whether a plain value is a default of Megatron, or describes its parallelism.

    >>> is_own_value("iteration", 0), is_own_value("iteration", 7)
    (True, False)
    >>> is_own_value("args.tensor_model_parallel_size", 8)
    True
    """
    if name in DEFAULTS:
        return repr(value) == repr(DEFAULTS[name])
    if EXTRA_STATE in name:
        # The extra state of layers without 8-bit floats is empty.
        return value is None
    return name.removeprefix("args.") in PARALLELISM.values() or (name == "args" and not value)


def with_parallelism(values: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Set the sizes of the target's axes in Megatron's arguments, if there are any.

    >>> with_parallelism({"args.tensor_model_parallel_size": 8}, {"tp": 2})
    {'args.tensor_model_parallel_size': 2}
    """
    result = dict(values)
    if any(name.startswith("args.") for name in values):
        result |= {
            f"args.{PARALLELISM[axis]}": sizes[axis] for axis in sizes if axis in PARALLELISM
        }
    return result


def _as_type(value: Any) -> Any:
    match = _TYPE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else Global("torch", match[1])


def read_object(folder: Path, item: StoredItem) -> Any:
    """Read an object that was saved as an item; offsets of its tensors are relative to its start.

    Raises:
        FormatError: an object that was transformed, is truncated, or is not a value.
    """
    path, start_bytes = folder / item.place.path, item.place.start_bytes
    label = f"{path} bytes {start_bytes}: object {item.name!r}"
    if item.transforms:
        raise FormatError(
            f"{label} was transformed ({', '.join(item.transforms)}), and determines whose "
            "the optimizer state is; save it without this extension"
        )
    with path.open("rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(start_bytes + offset)
            content = file.read(max(0, min(size, item.size_bytes - offset)))
            if len(content) != size:
                raise FormatError(f"{label} ends before byte {offset + size}; it was cut off")
            return content

        return read_torch_value(read, item.size_bytes, label)
