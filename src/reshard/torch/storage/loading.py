"""Loading: a model's parameters filled from a checkpoint, on every rank of a job.

Each rank reads its own part of each tensor, straight from the files, whatever ranks wrote
them; ranks do not talk to each other.

1. Compare names, shapes and dtypes. Everything that does not fit is in one error, raised
   before any tensor is written.
2. Read each local tensor in place. Where it is not in CPU memory, read beside it and copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError, UsageError
from reshard.execution.arrays import TorchTensors
from reshard.layout import Layout
from reshard.torch.distributed_tensor import layout_of, rank_of
from reshard.torch.forward_copies import find_copies, forget_cached
from reshard.torch.fully_sharded import find_groups, find_storage, free_gathered
from reshard.torch.models.module_memory import tensors_of
from reshard.torch.sides import check_writable

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load: tensors filled, bytes of this rank, and unused names."""

    tensors: int
    local_bytes: int
    unused: tuple[str, ...]


def load(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    target: torch.nn.Module | Mapping[str, Any],
    *,
    strict: bool = True,
    threads: int | None = None,
    readers_on_host: int = 1,
) -> LoadReport:
    """Fill a module, or a state dict of DTensors and tensors, from a checkpoint.

    Every rank of a job calls it. A DTensor gets this rank's shard, a plain tensor the full tensor.
    Values are written in place and never cast.

    Args:
        checkpoint: a checkpoint of any format and sharding, or its location.
        target: what to fill. Of a module, its parameters and persistent buffers.
        strict: whether names that only the checkpoint has are an error. Names that only the target
            has always are.
        threads: the number of reading threads on this rank; 4 when None, and 16 from an address.
        readers_on_host: the number of ranks of this host that load at the same time: from an
            address, data that several of them need is requested once, as by
            `reshard.checkpoint.load`.

    Raises:
        ShardError: names, shapes or dtypes that do not match, all of them in one message.
        UsageError: an invalid number of threads, or a target that is not a model.
        CheckpointError: an unusable checkpoint.
        RunError: a file that cannot be read.
    """
    from reshard.checkpoint import load as load_arrays
    from reshard.checkpoint import open as open_checkpoint
    from reshard.checkpoint.contents import Checkpoint

    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    given = dict(tensors_of(target))
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    # Parameters that FSDP1 has in flat ones, of which this rank may have no part.
    flat = {
        name: value
        for name, value in given.items()
        if isinstance(target, torch.nn.Module) and isinstance(value, tuple)
    }
    _check_fit(checkpoint, tensors, flat, strict)
    if isinstance(target, torch.nn.Module) and (problem := find_copies(target)):
        raise ShardError(f"{problem}; nothing was written")
    parts = {name: part for name, (part, _) in flat.items() if part is not None}
    written = {**tensors, **parts}
    storages = set(map(find_storage, written.values())) - {0}
    if problem := free_gathered(find_groups(storages, are_stale=True)):
        raise UsageError(f"the target's parameters are in use: {problem}")
    local_bytes = 0
    # One call, plain tensors too: processes that share reads meet once.
    rank = dist.get_rank() if flat else max(map(rank_of, tensors.values()), default=0)
    layouts = {
        name: layout_of(tensor)
        if isinstance(tensor, DTensor)
        else Layout.whole(tuple(tensor.shape), [rank], rank + 1)
        for name, tensor in tensors.items()
    }
    layouts |= {name: flat[name][1] for name in parts}
    locals_ = {name: _find_local(tensor) for name, tensor in written.items()}
    beside = {
        name: local if local.device.type == "cpu" else torch.empty_like(local, device="cpu")
        for name, local in locals_.items()
    }
    out = {name: TorchTensors(local).storage(local, name) for name, local in beside.items()}
    loaded = load_arrays(
        checkpoint, layouts, rank, out=out, threads=threads, readers_on_host=readers_on_host
    )
    for name in loaded:
        local_bytes += out[name].nbytes
        if beside[name] is not locals_[name]:
            locals_[name].copy_(beside[name])
        elif not locals_[name].is_inference():
            # What reads a file writes behind autograd's back.
            torch.autograd.graph.increment_version(locals_[name])
    forget_cached()
    unused = tuple(name for name in checkpoint.tensors if name not in given)
    return LoadReport(len(tensors) + len(flat), local_bytes, unused)


def _find_local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _find_write_problems(name: str, local: torch.Tensor) -> Iterator[str]:
    """Why elements of a tensor cannot be written."""
    if local.layout != torch.strided or local.device.type == "meta":
        yield f"{name}: a {local.layout} tensor on {local.device}; give one dense and in memory"
        return
    try:
        check_writable(local, None)
    except ShardError as error:
        yield f"{name}: {error}"


def _describe_missing(checkpoint: Checkpoint, name: str) -> str:
    if name in checkpoint.unreadable:
        return f"cannot be read, it is {checkpoint.unreadable[name]}"
    return "not in the checkpoint"


def _check_fit(
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    flat: Mapping[str, tuple[torch.Tensor | None, Layout]],
    strict: bool,
) -> None:
    problems = [
        f"{name}: {_describe_missing(checkpoint, name)}"
        for name in (*tensors, *flat)
        if name not in checkpoint.tensors
    ]
    for name, stored in checkpoint.tensors.items():
        if name not in tensors and name not in flat:
            problems += [f"{name}: in the checkpoint only"] * strict
            continue
        tensor, layout = flat[name] if name in flat else (tensors[name], None)
        shape = tensors[name].shape if layout is None else layout.shape
        if tuple(shape) != stored.shape:
            problems.append(f"{name}: shape {list(shape)}, stored {list(stored.shape)}")
        elif tensor is None:
            continue
        elif as_dtype(tensor.dtype) is not stored.dtype:
            problems.append(
                f"{name}: dtype {as_dtype(tensor.dtype).name}, stored {stored.dtype.name}"
            )
        elif layout is None and layout_of(tensor).contributions > 1:
            problems.append(f"{name}: partial, while a checkpoint holds values")
        else:
            problems += _find_write_problems(name, _find_local(tensor))
    if problems:
        more = f"\n  ... {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ShardError(
            f"{len(problems)} tensors do not fit {checkpoint.folder}; nothing was written:\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
        )
