"""Loading: fill a model's parameters from a checkpoint, on every rank of a job.

Each rank reads its own part of each tensor directly from the files, whichever ranks wrote them.
Ranks do not communicate.

1. Compare names, shapes and dtypes. All mismatches are reported in a single error, raised
   before any tensor is written.
2. Read each local tensor in place. A tensor outside CPU memory is read into a buffer and copied.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reshard.checkpoint.training.model_sets import find_prefixes, is_auxiliary, is_trainer_prefix
from reshard.checkpoint.training.state import find_training_state
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError, UsageError
from reshard.execution.arrays import TorchTensors
from reshard.layout import Layout
from reshard.text import first_lines
from reshard.torch.endpoint import check_writable, layout_of, rank_of
from reshard.torch.forward_copies import find_copies, forget_cached
from reshard.torch.fully_sharded import find_groups, find_storage, free_gathered
from reshard.torch.models.model_inputs import tensors_of

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint, StoredTensor

_SHOWN = 20
# More missing or additional names than these are summarized in a line.
_FEW = 8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load: filled tensors, the bytes of this rank, and unused names.

    `prefix` precedes the target's names in the checkpoint, such as `model.`.
    """

    tensors: int
    local_bytes: int
    unused: tuple[str, ...]
    prefix: str = ""


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
    Values are written in place and never cast. In a training checkpoint, such as
    `{"model": ..., "optim": ...}`, the target's names are found after their prefix (`model.`), and
    other training state is left alone.

    Args:
        checkpoint: a checkpoint of any format and sharding, or its location.
        target: the module or state dict to fill: a module's parameters and persistent buffers.
        strict: whether names that only the checkpoint has are an error. Names that only the target
            has always are.
        threads: the number of reading threads on this rank; 4 when None, and 16 from an address.
        readers_on_host: the number of ranks of this host that load at the same time: from an
            address, data that several of them need is requested once, as by
            `reshard.checkpoint.load`.

    Raises:
        ShardError: names, shapes or dtypes that do not match, all of them in one message; several
            models with the target's names.
        UsageError: an invalid number of threads, or a target that is not a model.
        CheckpointError: an unusable checkpoint.
        RunError: a file that cannot be read.
    """
    from reshard.checkpoint import load as load_arrays
    from reshard.checkpoint import open as open_checkpoint
    from reshard.checkpoint.contents import Checkpoint

    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    entries = dict(tensors_of(target))
    tensors = {name: t for name, t in entries.items() if isinstance(t, torch.Tensor)}
    # Parameters that FSDP1 stores in flat parameters; this rank may have no part of some.
    flat = {
        name: value
        for name, value in entries.items()
        if isinstance(target, torch.nn.Module) and isinstance(value, tuple)
    }
    prefix = _find_prefix(checkpoint, entries)
    _check_fit(checkpoint, prefix, tensors, flat, strict)
    if isinstance(target, torch.nn.Module) and (problem := find_copies(target)):
        raise ShardError(f"{problem}; nothing was written")
    parts = {name: part for name, (part, _) in flat.items() if part is not None}
    written = {**tensors, **parts}
    storages = set(map(find_storage, written.values())) - {0}
    if problem := free_gathered(find_groups(storages, are_stale=True)):
        raise UsageError(f"the target's parameters are in use: {problem}")
    local_bytes = 0
    # A single call that includes plain tensors: processes that share reads rendezvous once.
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
    load_arrays(
        checkpoint,
        {prefix + name: layout for name, layout in layouts.items()},
        rank,
        out={prefix + name: array for name, array in out.items()},
        threads=threads,
        readers_on_host=readers_on_host,
    )
    for name in layouts:
        local_bytes += out[name].nbytes
        if beside[name] is not locals_[name]:
            locals_[name].copy_(beside[name])
        # Reading a file writes tensors without autograd noticing, so mark them as changed. A
        # DTensor has a version of its own, which writes to its local tensor do not change.
        torch.autograd.graph.increment_version([written[name], locals_[name]])
    forget_cached()
    filled = {prefix + name for name in entries}
    unused = tuple(name for name in checkpoint.tensors if name not in filled)
    return LoadReport(len(tensors) + len(flat), local_bytes, unused, prefix)


def _find_local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _find_write_problems(local: torch.Tensor) -> Iterator[str]:
    """Yield why elements of a tensor cannot be written."""
    if local.layout != torch.strided or local.device.type == "meta":
        yield f"a {local.layout} tensor on {local.device}; give one dense and in memory"
        return
    try:
        check_writable(local, None)
    except ShardError as error:
        yield str(error)


def _find_prefix(checkpoint: Checkpoint, names: Collection[str]) -> str:
    """Return the prefix of the target's names in a training checkpoint; empty for none.

    Raises:
        ShardError: several models with these names, or a prefix that trainers do not use.
    """
    if all(name in checkpoint.tensors for name in names):
        return ""
    training = _list_training_state(checkpoint)
    prefixes = find_prefixes(
        {*names}, [name for name in checkpoint.tensors if name not in training]
    )
    if "" in prefixes or not prefixes:
        return ""
    first, *others = sorted(prefixes, key=lambda prefix: not is_trainer_prefix(prefix))
    if others or not is_trainer_prefix(first):
        shown = [first, *others][:_FEW]
        listed = ", ".join(f"{prefix}* ({prefixes[prefix]} tensors)" for prefix in shown)
        more = f" and {len(prefixes) - _FEW} others" if len(prefixes) > _FEW else ""
        raise ShardError(
            f"{checkpoint.folder} has the target's names after a prefix: {listed}{more}; choose "
            f"one: reshard.checkpoint.open(path, select={first.removesuffix('.')!r}). Nothing was "
            "written"
        )
    return first


def _list_training_state(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of tensors that are training state rather than weights."""
    state = find_training_state(checkpoint)
    beside = filter(is_auxiliary, checkpoint.tensors)
    return frozenset((*beside, *(() if state is None else state.optimizer_names)))


def _check_fit(
    checkpoint: Checkpoint,
    prefix: str,
    tensors: Mapping[str, torch.Tensor],
    flat: Mapping[str, tuple[torch.Tensor | None, Layout]],
    strict: bool,
) -> None:
    own_names = {prefix + name: name for name in (*tensors, *flat)}
    missing = [stored for stored in own_names if stored not in checkpoint.tensors]
    others = [stored for stored in checkpoint.tensors if strict and stored not in own_names]
    if prefix and others:
        training = _list_training_state(checkpoint)
        others = [stored for stored in others if stored not in training]
    problems = [
        f"{own_names[stored]}: {problem}"
        for stored in own_names
        if stored in checkpoint.tensors
        for problem in _find_misfits(checkpoint[stored], own_names[stored], tensors, flat)
    ]
    count = len(problems) + len(missing) + len(others)
    if not count:
        return
    problems = [
        *_describe_missing(checkpoint, missing, own_names),
        *_describe_others(others),
        *problems,
    ]
    raise ShardError(
        f"{count} tensors do not fit {checkpoint.folder}; nothing was written:"
        + first_lines(problems, _SHOWN)
    )


def _find_misfits(
    stored: StoredTensor,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    flat: Mapping[str, tuple[torch.Tensor | None, Layout]],
) -> Iterator[str]:
    """Yield the reasons why a stored tensor cannot fill the target's tensor of this name."""
    tensor, layout = flat[name] if name in flat else (tensors[name], None)
    shape = tensors[name].shape if layout is None else layout.shape
    if tuple(shape) != stored.shape:
        yield f"shape {list(shape)}, stored {list(stored.shape)}"
    elif tensor is None:
        return
    elif as_dtype(tensor.dtype) is not stored.dtype:
        yield f"dtype {as_dtype(tensor.dtype).name}, stored {stored.dtype.name}"
    elif layout is None and layout_of(tensor).contributions > 1:
        yield "partial, while a checkpoint holds values"
    else:
        yield from _find_write_problems(_find_local(tensor))


def _describe_missing(
    checkpoint: Checkpoint, missing: Sequence[str], own_names: Mapping[str, str]
) -> Iterator[str]:
    """Yield the tensors missing from the checkpoint; a single line if it has other names."""
    unreadable = [stored for stored in missing if stored in checkpoint.unreadable]
    absent = [stored for stored in missing if stored not in checkpoint.unreadable]
    for stored in unreadable:
        yield f"{own_names[stored]}: cannot be read, it is {checkpoint.unreadable[stored]}"
    if len(absent) <= _FEW or 2 * len(absent) <= len(own_names):
        yield from (f"{own_names[stored]}: not in the checkpoint" for stored in absent)
        return
    stored_name = next(iter(checkpoint.tensors), None)
    outer = own_names[absent[0]].partition(".")[0] + "."
    if all(stored.removeprefix(outer) in checkpoint.tensors for stored in absent):
        remedy = f"the checkpoint has them without {outer!r}: load that submodule"
    else:
        remedy = (
            "give the checkpoint the target's names by reshard.checkpoint.select(checkpoint, "
            "select=..., strip_prefix=[...], rename=[...]), or convert it: `reshard convert --for "
            "hf` writes the names of transformers"
        )
    yield (
        f"{len(absent)} of the target's {len(own_names)} names, such as {own_names[absent[0]]!r}, "
        f"are not in the checkpoint, whose names are such as {stored_name!r}; {remedy}"
    )


def _describe_others(others: Sequence[str]) -> Iterator[str]:
    """Yield the tensors missing from the target; a single line for many."""
    if len(others) <= _FEW:
        yield from (f"{stored}: in the checkpoint only" for stored in others)
        return
    yield (
        f"{len(others)} tensors are in the checkpoint only (first: {others[0]}); strict=False "
        "leaves them out"
    )
