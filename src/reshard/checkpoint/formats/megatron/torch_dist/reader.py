"""Opening `torch_dist`: a distributed checkpoint of PyTorch with Megatron's names and states.

    .metadata, __R_N.distcp   tensors and objects, by the keys of `dist_checkpointing`
    metadata.json             {"sharded_backend": "torch_dist", ...}
    common.pt                 the state that all ranks share: arguments, iteration, groups

1. The distributed checkpoint is opened as any other (`torch_dcp`).
2. Stacks of layers or experts are split into the tensors of the modules (`stacked_names`).
3. Optimizer state gets the names of all training formats. Its sharding type follows from its form:

       fully_reshardable, and a        tensors of the shapes of their parameters
         non-distributed optimizer
       fully_sharded_model_space       flat ranges of ranks, with leading dimensions that count
       blocks
         (Megatron-core to 0.15)       (`bind_flat_ranges`)
       dp_reshardable,                 buckets of parameters without names (`bucket_space`)
         dp_zero_gather_scatter,
         fully_sharded_bucket_space

4. `common.pt` and the groups in objects are plain values (`common_state`).

In `fully_sharded_model_space`, each rank has a range of the flattened block of a parameter of its
tensor-parallel rank. The dimensions of the parameter count blocks, and a further dimension the
elements of a block; the true shape is in the attribute `mcore_data`::

    parameter (64, 32) in 2 x 1 blocks of (32, 32)       stored as (2, 1, 1024)
      block (1, 0), elements 40:72                        chunk [1:2, 0:1, 40:72]
      = rows 33, columns 8:32, and row 34, columns 0:8

A range consists of a few boxes of the parameter, each dense in the file (`flat_range_boxes`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from reshard.checkpoint.blocks.fusing import StoredRegion, bind_stored_regions, list_stored_regions
from reshard.checkpoint.contents import Checkpoint, StoredChecksum, StoredTensor
from reshard.checkpoint.formats.megatron.common_state import add_optimizer, add_state, set_groups
from reshard.checkpoint.formats.megatron.modules import split_megatron_name
from reshard.checkpoint.formats.megatron.torch_dist import (
    BACKEND,
    COMMON_NAME,
    CONFIG_NAME,
    FORMAT_NAME,
    backend_of,
    stacked_names,
)
from reshard.checkpoint.formats.megatron.torch_dist.bucket_space import (
    has_buckets,
    is_of_buckets,
    read_buckets,
)
from reshard.checkpoint.formats.optimizer_states import MASTER, state_name
from reshard.checkpoint.formats.torch_dcp import reader
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues
from reshard.checkpoint.formats.torch_files.reading import read_storage, read_torch_dict
from reshard.checkpoint.formats.torch_files.values import as_sizes
from reshard.errors import CheckpointError, FormatError
from reshard.geometry.regions import flat_regions

# Keys of `content_metadata` that describe the storage of tensors in this checkpoint only.
CONTENT_KEYS = (
    "distrib_optim_sharding_type",
    "distrib_optim_fully_reshardable_mem_efficient",
    "chained_optim_avoid_prefix",
    "singleton_local_shards",
    "non_homogeneous_layers",
)


def read(folder: Path) -> Checkpoint:
    """Describe the checkpoint in a folder of `torch_dist`.

    Raises:
        CheckpointError: a file that is missing; another backend.
        FormatError, CoverageError: as of a distributed checkpoint of PyTorch; a state in
            `common.pt` that is not a state.
    """
    backend = backend_of(folder)
    if backend not in (None, BACKEND):
        raise CheckpointError(
            f"{folder / CONFIG_NAME} has the backend {backend!r}; only {BACKEND!r} "
            "is read. Load it with the Megatron-core that wrote it, and save it as torch_dist"
        )
    checkpoint = reader.read(folder)
    state = _read_common(folder)
    tensors = {tensor.name: tensor for tensor in _name_tensors(checkpoint)}
    unread: list[tuple[str, str]] = []
    if has_buckets(checkpoint):
        in_buckets, unread = read_buckets(folder, checkpoint, state, tensors)
        tensors |= in_buckets
    parameters = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if any(state_name(name, key) in tensors for key in (MASTER, "exp_avg"))
    }
    note = set_groups(state, parameters)
    return dataclasses.replace(
        checkpoint,
        format=FORMAT_NAME,
        tensors=tensors,
        values=state.values,
        paths={**_keep_paths(checkpoint, tensors), **state.paths},
        checksums=tuple(_name_checksums(checkpoint.checksums, tensors)),
        items={name: item for name, item in checkpoint.items.items() if not is_of_buckets(name)},
        attributes={k: v for k, v in checkpoint.attributes.items() if k != "mcore_data"},
        unread=(
            *checkpoint.unread,
            *((f"{COMMON_NAME}: {name}", why) for name, why in state.unread),
            *unread,
        ),
        notes=(*checkpoint.notes, *([note] if note else [])),
    )


def _read_common(folder: Path) -> PlainValues:
    path = folder / COMMON_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; Megatron has the iteration, the arguments and the optimizer's "
            "groups in it. Fetch it again, the checkpoint is incomplete"
        )
    state = PlainValues()
    for key, value in read_torch_dict(path, "the state that ranks share").items():
        if key == "optimizer":
            add_optimizer(state, value, partial(read_storage, path))
        elif key == "content_metadata" and isinstance(value, dict):
            if own := {k: v for k, v in value.items() if k not in CONTENT_KEYS}:
                add_state(state, (key,), own, str(path))
        elif type(key) is str:
            add_state(state, (key,), value, str(path))
        else:
            state.unread.append((repr(key), "its name is not text"))
    return state


def _name_tensors(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    """Yield the tensors by the names of modules and of training state."""
    reshaped = checkpoint.attributes.get("mcore_data")
    reshaped = reshaped if isinstance(reshaped, Mapping) else {}

    def name_all() -> Iterator[StoredTensor]:
        for key, tensor in checkpoint.tensors.items():
            if is_of_buckets(key):
                continue
            if key in reshaped:
                tensor = bind_flat_ranges(tensor, reshaped[key])
            state = split_megatron_name(key)
            if state is None:
                yield from (
                    stacked_names.unstack(tensor)
                    if stacked_names.has_stacks(key) or ".experts." in key
                    else [tensor]
                )
                continue
            for part in stacked_names.unstack(dataclasses.replace(tensor, name=state[0])):
                yield stacked_names.name_state((part.name, state[1]), part)

    yield from stacked_names.name_parameters(name_all(), checkpoint.folder)


def _keep_paths(checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths of tensors that keep their names, and of items."""
    return {
        name: path
        for name, path in checkpoint.paths.items()
        if name in tensors or name in checkpoint.items
    }


def _name_checksums(
    checksums: Iterable[StoredChecksum], tensors: Mapping[str, StoredTensor]
) -> Iterator[StoredChecksum]:
    """Yield the checksums of archives, each by the name of its first tensor."""
    names: dict[tuple[str, int], str] = {}
    for name, tensor in tensors.items():
        for address in tensor.binding.addresses.values():
            for place in address if isinstance(address, tuple) else (address,):
                names.setdefault((place.path, place.start_bytes), name)  # type: ignore[union-attr]
    for checksum in checksums:
        owner = names.get((checksum.place.path, checksum.place.start_bytes))
        if owner is not None:
            yield dataclasses.replace(checksum, tensor=owner)


_SHAPE_KEY = "nd_reformulated_orig_global_shape"


def bind_flat_ranges(tensor: StoredTensor, described: object) -> StoredTensor:
    """Bind a tensor of blocks and elements to its true shape, which `described` contains.

    Raises:
        FormatError: a shape that does not consist of the blocks.
    """
    shape = as_sizes(described.get(_SHAPE_KEY)) if isinstance(described, dict) else None
    stored = tensor.shape
    if shape is None:
        return tensor
    # A damaged file may have a count of 0, or another number of dimensions.
    blocks = tuple(n // max(count, 1) for n, count in zip(shape, stored, strict=False))
    if (
        len(stored) != len(shape) + 1
        or any(n != size * count for n, size, count in zip(shape, blocks, stored, strict=False))
        or math.prod(blocks) != stored[-1]
    ):
        raise FormatError(
            f"tensor {tensor.name!r} is stored as {list(stored)}, blocks and elements of a block; "
            f"they do not form its shape {list(shape)}"
        )
    return bind_stored_regions(tensor.name, tensor, shape, _list_parts(tensor, blocks))


def _list_parts(tensor: StoredTensor, block: tuple[int, ...]) -> Iterator[StoredRegion]:
    """Yield the parts in the true shape, block by block."""
    for slot, stored in list_stored_regions(tensor):
        # A chunk is inside a block, but the regions of a tensor may extend over several.
        for index in product(*map(range, stored.start[:-1], stored.stop[:-1])):
            flat = stored
            for at in index:
                flat = flat.drop(0, at)
            (low,), (high,), container, offset, (stride,) = flat
            first = [at * size for at, size in zip(index, block, strict=True)]
            for region in flat_regions(block, low, high, container, offset, stride):
                yield slot, region.translate(first)
