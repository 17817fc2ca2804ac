"""Layers and experts: one tensor for all of them, as `torch_dist` has, or one for each.

`dist_checkpointing` keeps what layers have alike in one tensor with a dimension of layers in front,
and the experts of these with one more behind it::

    decoder.layers.mlp.linear_fc2.weight (4, 32, 48)
      = decoder.layers.0.mlp.linear_fc2.weight (32, 48), decoder.layers.1.mlp. ...

    decoder.layers.mlp.experts.experts.linear_fc2.weight (4, 8, 32, 48)
      = decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight (32, 48), ...

The names below are those of Megatron's modules, numbered over the whole model; recipes know them.
Where layers differ, a checkpoint has the number in the name already. With `singleton_local_shards`
it has each expert's too, and the two halves of a gated layer apart (`weight_w`, `weight_v`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from reshard.checkpoint.blocks.fusing import (
    bind_boxes,
    fuse_members,
    list_stored_boxes,
    split_stack,
)
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.torch_dcp.writer import StackedPlace
from reshard.layout import Layout
from reshard.recipes.naming import Fusion

# `layers.` without a number behind it, and the experts of a layer without theirs.
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d+\.)")
_EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
_LAYER = re.compile(r"^((?:.*?\.)?layers)\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_HALF = re.compile(r"^(.*linear_fc1\.(?:weight|bias)\d*)_([wv])$")


def has_stacks(key: str) -> bool:
    """Return whether a tensor of that name holds layers or experts.

    >>> has_stacks("decoder.layers.mlp.linear_fc1.weight"), has_stacks("decoder.layers.0.mlp")
    (True, False)
    """
    return bool(_LAYERS.search(key) or _EXPERTS.search(key))


def unstack(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the tensors that a stacked one holds, by the names of the modules; itself elsewhere."""
    key = _EXPERT.sub(r".experts.local_experts.\1.", tensor.name)
    for pattern, into in ((_LAYERS, "{}."), (_EXPERTS, None)):
        match = pattern.search(key)
        if match is None or not tensor.shape:
            continue
        if into is None:
            member = f"{key[: match.start()]}.experts.local_experts.{{}}.{key[match.end() :]}"
        else:
            member = f"{key[: match.end()]}{into}{key[match.end() :]}"
        if not tensor.shape[0]:
            continue
        # Not as members of a fusion, which have dimensions: a layer may have a scalar.
        of_numbers = split_stack(
            list_stored_boxes(tensor), tensor.dtype.itemsize_bytes, tensor.shape[0]
        )
        for number, boxes in enumerate(of_numbers):
            name = member.replace("{}", str(number))
            yield from unstack(bind_boxes(name, tensor, tensor.shape[1:], boxes))
        return
    yield tensor if key == tensor.name else _rename(tensor, key)


def join_halves(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Yield tensors with those halves joined that `singleton_local_shards` keeps apart."""
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


def _rename(tensor: StoredTensor, name: str) -> StoredTensor:
    return StoredTensor(name, tensor.dtype, tensor.binding, tensor.spec, tensor.digest)


def find_places(layouts: Mapping[str, tuple[object, Layout]]) -> dict[str, StackedPlace]:
    """Return where `torch_dist` has each tensor, by the names of the modules.

    Args:
        layouts: element type and layout by name.

    Layers are stacked where all of a row of them have the same tensors, as Megatron does, else
    numbered; experts are always stacked.
    """
    shapes = {name: (dtype, layout.shape) for name, (dtype, layout) in layouts.items()}
    with_experts = _stack_experts(shapes)
    alike = _find_alike_layers(shapes)
    places = {}
    for name in shapes:
        place = with_experts.get(name, StackedPlace(name))
        match = _LAYER.match(place.key)
        count = alike.get(match[1]) if match else None
        if match is not None and count is not None:
            key = f"{match[1]}.{match[3]}"
            place = StackedPlace(key, (int(match[2]), *place.at), (count, *place.counts))
        places[name] = place
    return places


_Shapes = Mapping[str, tuple[object, tuple[int, ...]]]


def _stack_experts(shapes: _Shapes) -> dict[str, StackedPlace]:
    """Return the places of experts that are complete, from 0 on, and of one shape."""
    found: dict[str, dict[int, str]] = {}
    for name in shapes:
        match = _LOCAL_EXPERT.search(name)
        if match is not None:
            key = f"{name[: match.start()]}.experts.experts.{name[match.end() :]}"
            found.setdefault(key, {})[int(match[1])] = name
    places = {}
    for key, members in found.items():
        count = len(members)
        if [*sorted(members)] != [*range(count)] or len({shapes[n] for n in members.values()}) > 1:
            continue
        for number, name in members.items():
            places[name] = StackedPlace(key, (number,), (count,))
    return places


def _find_alike_layers(shapes: _Shapes) -> dict[str, int]:
    """Return the rows of layers of which all have the same tensors, with their number."""
    rows: dict[str, dict[int, set[tuple[object, ...]]]] = {}
    for name, kind in shapes.items():
        match = _LAYER.match(name)
        if match is not None:
            rows.setdefault(match[1], {}).setdefault(int(match[2]), set()).add((match[3], *kind))
    return {
        row: len(layers)
        for row, layers in rows.items()
        if [*sorted(layers)] == [*range(len(layers))]
        and all(layer == layers[0] for layer in layers.values())
    }
