"""Stacks of layers and experts, the tensors of `torch_dist`, and their members.

`dist_checkpointing` stores equal tensors of layers as a tensor with a leading dimension of layers,
and their experts with a second dimension::

    decoder.layers.mlp.linear_fc2.weight (4, 32, 48)
      = decoder.layers.0.mlp.linear_fc2.weight (32, 48), decoder.layers.1.mlp. ...

    decoder.layers.mlp.experts.experts.linear_fc2.weight (4, 8, 32, 48)
      = decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight (32, 48), ...

Members have the names of Megatron's modules, numbered over the whole model; recipes know
them. If layers differ, names of tensors contain the number of the layer. With
`singleton_local_shards` they also contain the expert's number, and the halves of a gated layer are
separate (`weight_w`, `weight_v`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from reshard.checkpoint.blocks.fusing import (
    bind_stored_regions,
    fuse_members,
    list_stored_regions,
    split_stack,
)
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.megatron import modules
from reshard.checkpoint.formats.optimizer_states import state_name
from reshard.checkpoint.formats.torch_dcp.writer import StackedPlace
from reshard.errors import FormatError
from reshard.layout import Layout
from reshard.recipes.naming import Fusion

# `layers.` and `experts.` that are not followed by a number.
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d+\.)")
_EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
_HALF = re.compile(r"^(.*linear_fc1\.(?:weight|bias)\d*)_([wv])$")


def has_stacks(key: str) -> bool:
    """Return whether a tensor of that name holds layers or experts.

    >>> has_stacks("decoder.layers.mlp.linear_fc1.weight"), has_stacks("decoder.layers.0.mlp")
    (True, False)
    """
    return bool(_LAYERS.search(key) or _EXPERTS.search(key))


def unstack(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the members of a stack by the names of the modules, or a tensor that is not a stack."""
    key = _name_expert(tensor.name)
    member = _find_member(key)
    if member is None or not tensor.shape or not tensor.shape[0]:
        yield tensor if key == tensor.name else _rename(tensor, key)
        return
    # Not as members of a fusion, which have dimensions: a member may be a scalar.
    for number, parts in enumerate(split_stack(list_stored_regions(tensor), tensor.shape[0])):
        name = member.replace("{}", str(number))
        yield from unstack(bind_stored_regions(name, tensor, tensor.shape[1:], parts))


def _name_expert(key: str) -> str:
    """Return a key with the number of its expert, if it has one, where modules have it."""
    return _EXPERT.sub(r".experts.local_experts.\1.", key)


def _find_member(key: str) -> str | None:
    """Return the name of the members of a stack, with `{}` as their number; None for another key.

    >>> _find_member("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    'decoder.layers.{}.mlp.experts.experts.linear_fc1.weight'
    """
    if match := _LAYERS.search(key):
        return f"{key[: match.end()]}{{}}.{key[match.end() :]}"
    if match := _EXPERTS.search(key):
        return f"{key[: match.start()]}.experts.local_experts.{{}}.{key[match.end() :]}"
    return None


def find_read_name(place: StackedPlace, shape: tuple[int, ...]) -> str:
    """Return the name that a reader gives to a tensor in a place, before halves are joined.

    >>> find_read_name(StackedPlace("decoder.layers.mlp.weight", (1,), (2,)), (8, 4))
    'decoder.layers.1.mlp.weight'
    """
    state = modules.split_megatron_name(place.key)
    name = _name_expert(place.key if state is None else state[0])
    at, sizes = place.at, (*place.counts, *shape)
    while sizes and sizes[0] and (member := _find_member(name)) is not None:
        name = _name_expert(member.replace("{}", str(at[0] if at else 0)))
        at, sizes = at[1:], sizes[1:]
    return name if state is None else state_name(name, state[1])


def whole_of_half(name: str) -> str | None:
    """Return the parameter whose rows are split into `name` and another half, or None.

    >>> whole_of_half("mlp.linear_fc1.weight_w"), whole_of_half("mlp.linear_fc1.weight")
    ('mlp.linear_fc1.weight', None)
    """
    match = _HALF.match(name)
    return None if match is None else match[1]


def join_halves(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Join the halves of gated layers, which `singleton_local_shards` separates."""
    waiting: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        match = _HALF.match(tensor.name)
        if match is None:
            yield tensor
            continue
        halves = waiting.setdefault(match[1], {})
        halves[match[2]] = tensor
        if len(halves) == 2:
            members = (f"{match[1]}_w", f"{match[1]}_v")
            yield fuse_members(match[1], Fusion(members), [halves["w"], halves["v"]])
            del waiting[match[1]]
    for halves in waiting.values():
        yield from halves.values()


def name_state(state: tuple[str, str] | None, tensor: StoredTensor) -> StoredTensor:
    """Return a tensor whose name begins with the key of its `(parameter, key)`, if it is state.

    So the names of halves end with their suffix.
    """
    if state is None:
        return tensor
    # Names of modules never contain this separator.
    return _rename(tensor, f"{state[1]}\0{state[0]}")


def name_parameters(tensors: Iterable[StoredTensor], folder: Path) -> Iterator[StoredTensor]:
    """Join halves, and yield the tensors of `name_state` by the names of modules.

    Raises:
        FormatError: two tensors of the same name.
    """
    named = [*join_halves(tensors)]
    parameters = {tensor.name.rpartition("\0")[2] for tensor in named}
    seen: set[str] = set()
    for tensor in named:
        key, mark, parameter = tensor.name.rpartition("\0")
        parameter = modules.engine_name(parameter, parameters)
        name = state_name(parameter, key) if mark else parameter
        if name in seen:
            raise FormatError(
                f"{folder} has two tensors that are {name!r}, once among all layers or "
                "experts; they belong to different saves"
            )
        seen.add(name)
        yield _rename(tensor, name)


def _rename(tensor: StoredTensor, name: str) -> StoredTensor:
    return StoredTensor(name, tensor.dtype, tensor.binding, tensor.spec, tensor.digest)


def find_places(layouts: Mapping[str, tuple[object, Layout]]) -> dict[str, StackedPlace]:
    """Return the place in a stack of each tensor, by the names of the modules.

    Args:
        layouts: dtype and layout by name.

    As in Megatron, layers are stacked if all of them have equal tensors; otherwise they are
    numbered. Experts are always stacked.
    """
    shapes = {name: (dtype, layout.shape) for name, (dtype, layout) in layouts.items()}
    with_experts = _stack_experts(shapes)
    alike = _find_alike_layers(shapes)
    places = {}
    for name in shapes:
        place = with_experts.get(name, StackedPlace(name))
        layer = modules.split_layer(place.key)
        if layer is not None and (count := alike.get(layer[0])) is not None:
            key = f"{layer[0].removesuffix('.')}{layer[2]}"
            place = StackedPlace(key, (layer[1], *place.at), (count, *place.counts))
        places[name] = place
    return places


_Shapes = Mapping[str, tuple[object, tuple[int, ...]]]


def _stack_experts(shapes: _Shapes) -> dict[str, StackedPlace]:
    """Return the places of experts with numbers from 0 on and equal shapes."""
    stacks: dict[str, dict[int, str]] = {}
    for name in shapes:
        if (expert := modules.split_expert(name)) is not None:
            before, number, rest = expert
            key = f"{before.removesuffix('local_experts.')}experts{rest}"
            stacks.setdefault(key, {})[number] = name
    places = {}
    for key, members in stacks.items():
        count = len(members)
        if [*sorted(members)] != [*range(count)] or len({shapes[n] for n in members.values()}) > 1:
            continue
        for number, name in members.items():
            places[name] = StackedPlace(key, (number,), (count,))
    return places


def _find_alike_layers(shapes: _Shapes) -> dict[str, int]:
    """Return the number of layers of each sequence of layers with equal tensors."""
    rows: dict[str, dict[int, set[tuple[object, ...]]]] = {}
    for name, kind in shapes.items():
        if (layer := modules.split_layer(name)) is not None:
            row, number, rest = layer
            rows.setdefault(row, {}).setdefault(number, set()).add((rest, *kind))
    return {
        row: len(layers)
        for row, layers in rows.items()
        if [*sorted(layers)] == [*range(len(layers))]
        and all(layer == layers[0] for layer in layers.values())
    }
