"""Plain values of a training state: values from pickled items, groups of hyper-parameters.

PyTorch's distributed checkpoints store each value in a small archive of its own. Like all archives,
these are read without running any code in them (`reshard.checkpoint.formats.torch_files`).

Groups of parameters are stored in three ways, and become a list of dicts::

    optim.param_groups.0.lr           by the group's number     [{"lr": 0.1, "params": [NAME]}]
    optim.param_groups.NAME.lr        by parameter; equal values form a group
    optimizer.param_groups            the list itself; numbers of parameters become names

`differing_values` compares the values of two checkpoints. Lists and dicts are compared item by
item, since formats store them whole or in parts. Values are compared by their `repr`, so that a NaN
is equal to itself and True differs from 1. A format's own values (`CheckpointFormat.is_own_value`)
are ignored.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from reshard.checkpoint.contents import Checkpoint, StoredItem
from reshard.checkpoint.formats.registry import find_format
from reshard.checkpoint.formats.torch_files.reading import read_torch_value
from reshard.checkpoint.formats.torch_files.values import is_plain
from reshard.checkpoint.storage.filesystem import read_range
from reshard.checkpoint.training.model_sets import bare_name
from reshard.checkpoint.training.state import TrainingState
from reshard.errors import CheckpointError, FormatError

MAX_ITEM_BYTES = 16 * 1024 * 1024
PARAMETERS = "params"
#: PyTorch's names of Optax's hyper-parameters. PyTorch keeps both betas in a tuple.
INJECTED = {
    "learning_rate": "lr",
    "b1": "beta1",
    "b2": "beta2",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
    "rho": "rho",
}


def decode_items(
    checkpoint: Checkpoint, names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the plain values of the named items, and why the other items do not have any."""
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    by_file: dict[str, list[StoredItem]] = {}
    for name in names:
        item = checkpoint.items[name]
        by_file.setdefault(item.place.path, []).append(item)
    for file, items in by_file.items():
        path = checkpoint.path(file)
        try:
            with path.open("rb", buffering=0) as opened:
                for item in items:
                    _decode(item, opened, values, unread)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return values, unread


def in_plain_values(checkpoint: Checkpoint, *, keeps_others: bool = False) -> Checkpoint:
    """Return a checkpoint whose pickled items are plain values.

    Other items are its `unread`, or stay items if `keeps_others`.
    """
    values, unread = decode_items(checkpoint, checkpoint.items)
    items = {n: item for n, item in checkpoint.items.items() if keeps_others and n in unread}
    return dataclasses.replace(
        checkpoint,
        items=items,
        values={**checkpoint.values, **values},
        unread=(*checkpoint.unread, *((n, why) for n, why in unread.items() if n not in items)),
    )


def _decode(
    item: StoredItem, file: BinaryIO, values: dict[str, Any], unread: dict[str, str]
) -> None:
    if item.transforms:
        unread[item.name] = f"its bytes are {', '.join(item.transforms)}"
        return
    if item.size_bytes > MAX_ITEM_BYTES:
        unread[item.name] = f"more than {MAX_ITEM_BYTES} bytes"
        return
    start, size = item.place.start_bytes, item.size_bytes
    content = read_range(file, start, size)

    def read(offset: int, length: int) -> bytes:
        result = content[offset : offset + length]
        if offset < 0 or len(result) < length:
            raise FormatError(f"{item.name!r} ends early")
        return result

    try:
        value = read_torch_value(read, len(content), repr(item.name))
    except FormatError as error:
        unread[item.name] = str(error)
        return
    if is_plain(value):
        values[item.name] = value
    else:
        unread[item.name] = "an object of a program's own class, or tensors"


def names_of_groups(names: Iterable[str], state: TrainingState) -> list[str]:
    """Return the names under which groups of the optimizers are stored."""
    prefixes = tuple(
        f"{container}.param_groups" if container else "param_groups"
        for container in state.containers
    )
    return [name for name in names if name.startswith(prefixes)]


def rename_group_members(
    checkpoint: Checkpoint, state: TrainingState, names: Mapping[str, Iterable[str]]
) -> Checkpoint:
    """Rename the parameters that groups of optimizers list.

    Args:
        checkpoint: the checkpoint with the groups, as plain values or as pickled items, which
            become values.
        state: its training state.
        names: the new bare names of each parameter, by its bare name. A new name that several
            parameters share, such as that of a fused parameter, is listed once. Other parameters
            keep their names.
    """
    suffix = f".{PARAMETERS}"
    ends = (suffix, "param_groups")
    pickled = [n for n in names_of_groups(checkpoint.items, state) if n.endswith(ends)]
    decoded, _ = decode_items(checkpoint, pickled)
    values = {**checkpoint.values, **decoded}
    for name in names_of_groups(values, state):
        if not isinstance(values[name], list):
            continue
        if name.endswith(suffix):
            values[name] = _rename_members(values[name], names)
        else:
            values[name] = [
                {**group, PARAMETERS: _rename_members(group[PARAMETERS], names)}
                if isinstance(group, dict) and isinstance(group.get(PARAMETERS), list)
                else group
                for group in values[name]
            ]
    items = {name: item for name, item in checkpoint.items.items() if name not in decoded}
    return dataclasses.replace(checkpoint, values=values, items=items)


def _rename_members(members: list[Any], names: Mapping[str, Iterable[str]]) -> list[Any]:
    result: list[Any] = []
    for member in members:
        new = names.get(bare_name(member), (member,)) if isinstance(member, str) else (member,)
        result += [name for name in new if name not in result]
    return result


def find_groups(values: Mapping[str, Any], state: TrainingState) -> list[dict[str, Any]]:
    """Return the groups of all optimizers; `params` are bare names of parameters."""
    groups: list[dict[str, Any]] = []
    for container in state.containers:
        prefix = f"{container}.param_groups" if container else "param_groups"
        whole = values.get(prefix)
        inside = {
            name[len(prefix) + 1 :]: value
            for name, value in values.items()
            if name.startswith(f"{prefix}.")
        }
        # Groups are stored as a list, or as values by the group's number, or by parameter.
        if isinstance(whole, list):
            own = [dict(group) for group in whole if isinstance(group, dict)]
        elif inside and all(re.match(r"\d+\.\w+$", name) for name in inside):
            own = _collect_by_number(inside)
        else:
            own = _collect_by_parameter(inside)
        names = state.numbers.get(container)
        for group in own:
            members = group.get(PARAMETERS)
            if isinstance(members, list):
                group[PARAMETERS] = [_name_member(member, names) for member in members]
        groups += own
    return groups


def _name_member(member: Any, names: tuple[str, ...] | None) -> Any:
    if isinstance(member, str):
        return bare_name(member)
    is_number = type(member) is int and names is not None and 0 <= member < len(names)
    return names[member] if names is not None and is_number else member


def _collect_by_number(inside: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name, value in inside.items():
        number, _, key = name.partition(".")
        groups.setdefault(int(number), {})[key] = value
    return [groups[number] for number in sorted(groups)]


def _collect_by_parameter(inside: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in inside.items():
        parameter, _, key = name.rpartition(".")
        by_parameter.setdefault(parameter, {})[key] = value
    # Hyper-parameters may be lists, which cannot be keys of a dict, so groups are found by `repr`.
    groups: dict[str, dict[str, Any]] = {}
    for parameter, hyper in by_parameter.items():
        group = groups.setdefault(repr(sorted(hyper.items())), {**hyper, PARAMETERS: []})
        group[PARAMETERS].append(parameter)
    return [*groups.values()]


def differing_values(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the names of the plain values that differ, each with a description."""
    left, right = dict(_list_leaves(a.values)), dict(_list_leaves(b.values))
    formats = [item for item in (find_format(a.format), find_format(b.format)) if item is not None]
    for name in [*left, *(name for name in right if name not in left)]:
        values = [side[name] for side in (left, right) if name in side]
        # Two sides with a single text; a value that only a side has never passes.
        if len({*map(repr, values)}) == len(values) - 1:
            continue
        if any(all(format_.is_own_value(name, value) for value in values) for format_ in formats):
            continue
        if len(values) == 2:
            yield name, f"is {values[0]!r} and {values[1]!r}"
        else:
            yield name, f"is only in {(a if name in left else b).folder}"


def _list_leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten lists and dicts to values by path; an empty list or dict is a value itself."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, list | tuple) and value:
            yield from _list_leaves(dict(enumerate(value)), f"{path}.")
        elif isinstance(value, dict) and value:
            yield from _list_leaves(value, f"{path}.")
        else:
            yield path, value
