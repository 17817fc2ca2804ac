"""What a checkpoint on disk holds, read without reshard and compared with the oracle.

`safetensors` and `torch` read the files; `oracle` says, element by element, what
each rank should have.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from checkpoint.checkpoint_files import Tensor, read_file, read_ranks
from oracle import contents_of_spec
from reshard.sharding import ShardingSpec
from soak.wrong import Wrong


class Piece(NamedTuple):
    """A box of a tensor that a rank's file stores."""

    rank: int
    name: str
    start: tuple[int, ...]
    content: Tensor


def torch_pieces(folder: Path) -> Iterator[Piece]:
    """Every chunk of a distributed checkpoint of PyTorch, by PyTorch's own `.metadata`."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    files: dict[str, bytes] = {}
    for index, place in metadata.storage_data.items():
        file = place.relative_path
        if file not in files:
            files[file] = (folder / file).read_bytes()
        archive = files[file][place.offset : place.offset + place.length]
        found = torch.load(io.BytesIO(archive), weights_only=True)
        described = metadata.state_dict_metadata[index.fqn]
        if found.dtype != described.properties.dtype:
            raise Wrong(f"{index} is {found.dtype}, listed as {described.properties.dtype}")
        rank = int(file.split("_")[2])
        yield Piece(rank, index.fqn, tuple(index.offset), _as_tensor(found))


def _as_tensor(found: Any) -> Tensor:
    from reshard.dtypes import dtype

    element = dtype(str(found.dtype).removeprefix("torch."))
    shape = tuple(found.shape)
    data = found.contiguous().reshape(-1)
    content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return Tensor(element, np.frombuffer(content, dtype=element.storage).reshape(shape))


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint of whole ones, of one file or many with an index."""
    found: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        for name, tensor in read_file(path).items():
            if name in found:
                raise Wrong(f"{name} is stored twice")
            found[name] = tensor
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        if sorted(index["weight_map"]) != sorted(found):
            raise Wrong(f"the index has {sorted(index['weight_map'])}, not {sorted(found)}")
    return found


def pieces_of_ranks(folder: Path) -> dict[str, dict[int, Tensor]]:
    """The shards of every tensor by rank, of rank-sharded safetensors."""
    found: dict[str, dict[int, Tensor]] = {}
    for rank, tensors in read_ranks(folder).items():
        for name, tensor in tensors.items():
            found.setdefault(name, {})[rank] = tensor
    return found


def check_torch(
    folder: Path, wholes: Mapping[str, Tensor], specs: Mapping[str, ShardingSpec] | None
) -> None:
    """Each element is stored once, bit for bit, by a rank that should hold it."""
    numbers = {name: np.arange(math.prod(w.shape)).reshape(w.shape) for name, w in wholes.items()}
    seen = {name: np.zeros(w.shape, dtype=np.int64) for name, w in wholes.items()}
    held = {
        name: {
            rank: set(elements.ravel().tolist())
            for rank, elements in contents_of_spec(spec, wholes[name].shape).elements.items()
        }
        for name, spec in (specs or {}).items()
    }
    for rank, name, start, content in torch_pieces(folder):
        box = tuple(slice(a, a + n) for a, n in zip(start, content.shape, strict=True))
        if Tensor(content.dtype, wholes[name].bits[box]) != content:
            raise Wrong(f"{name} {box} on rank {rank} has other bits")
        seen[name][box] += 1
        if specs is not None and not set(numbers[name][box].ravel().tolist()) <= held[name][rank]:
            raise Wrong(f"rank {rank} stores {box} of {name}, which it should not hold")
    for name, count in seen.items():
        if (count != 1).any():
            raise Wrong(f"{name} is stored {count.min()} to {count.max()} times")


def check_placement(
    placed: Mapping[str, Mapping[int, Tensor]],
    wholes: Mapping[str, Tensor],
    strategy: str,
    ranks: int,
) -> None:
    """Whole tensors on one rank each, or their rows cut by ceil."""
    if sorted(placed) != sorted(wholes):
        raise Wrong(f"the target has {sorted(placed)}, expected {sorted(wholes)}")
    for name, whole in wholes.items():
        parts = placed[name]
        if strategy in ("sharded", "parallel") and whole.shape and 0 not in whole.shape:
            rows = -(-whole.shape[0] // ranks)
            expected = {
                rank: Tensor(whole.dtype, whole.bits[rank * rows : (rank + 1) * rows])
                for rank in range(-(-whole.shape[0] // rows))
            }
        else:
            expected = dict.fromkeys(parts, whole)
        if dict(parts) != expected or (len(expected) != 1 and expected.keys() != parts.keys()):
            raise Wrong(f"{strategy} over {ranks}: {name} is {dict(parts)}, expected {expected}")
    if strategy in ("round_robin", "simple"):
        each = [sum(rank in parts for parts in placed.values()) for rank in range(ranks)]
        if max(each) - min(each) > 1:
            raise Wrong(f"{strategy} over {ranks}: {each} tensors on the ranks")
