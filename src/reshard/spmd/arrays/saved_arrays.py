"""Saving sharded arrays as a checkpoint, and loading them.

The arrays of a tree (lists, tuples, dictionaries) are named by their paths::

    {"weights": {"up": a}, "layers": [b, c]}      weights.up, layers.0, layers.1

A checkpoint has whole tensors by these names, and no mesh: it is loaded in any other shardings,
each rank reading its own part.

1. In a single process, the shards are a checkpoint in memory, which is converted to the target.
2. Over processes, each rank writes the boxes that no other rank writes (`box_save`).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from reshard.checkpoint import open as open_checkpoint
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.plan import plan_conversion
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.loading.background import BackgroundWork
from reshard.checkpoint.loading.rank_arrays import hold_arrays
from reshard.checkpoint.loading.request import load as load_parts
from reshard.checkpoint.storage.filesystem import translate_os_errors
from reshard.checkpoint.storage.remote_paths import RemotePath, as_path
from reshard.checkpoint.storage.threads import ProgressFunction
from reshard.dtypes import DType
from reshard.errors import CheckpointError, UsageError
from reshard.layout import Layout
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.arrays.argument_tree import keyed_leaves, leaves, replaced
from reshard.spmd.arrays.sharded_array import array, from_shards
from reshard.spmd.core.array_type import ArrayType, settled
from reshard.spmd.ops.data_types import astype
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import Runner, runner_for

_SHOWN = 5
_MAX_BOXES = 256
"""The number of boxes of an array up to which a rank writes them unchanged."""


class SavedArray(NamedTuple):
    """A record of an array to save, and its shards here, by rank."""

    type: ArrayType
    shards: dict[int, Any]


def save(
    target: str | os.PathLike[str],
    arrays: Any,
    *,
    format: str = "safetensors",
    overwrite: bool = False,
    group: Any = None,
) -> None:
    """Save arrays in shards as a checkpoint, which appears when it is complete.

    Over processes all processes of the group call it, each with the arrays that it has; each writes
    its own part. Sums that are pending are reduced first.

    Args:
        target: a folder, or an address that can be written.
        arrays: lists, tuples and dictionaries of arrays in shards, as deep as wanted; None is left
            out. The name of an array is its place: `layers.0.up`.
        format: `safetensors` (whole tensors), `torch-dcp`, or another that can be written;
            `sharded-safetensors`, a file a rank, only over processes.
        overwrite: replace a checkpoint that is there.
        group: over processes, the process group that saves; all processes when None.

    Raises:
        UsageError: a value that is not an array, two arrays of equal names, a format that cannot be
            written, a checkpoint that is there.
        RunError: what cannot be written; what is there stays as it was.

    >>> import tempfile, reshard, reshard.spmd as sp
    >>> mesh, folder = reshard.DeviceMesh.of(x=2), tempfile.mkdtemp()
    >>> weights = {"up": sp.ones((4, 6), spec=reshard.spec(mesh, "x, -"))}
    >>> sp.save(f"{folder}/step-1", {"weights": weights})
    >>> sorted(reshard.checkpoint.open(f"{folder}/step-1").tensors)
    ['weights.up']
    """
    _prepare(target, arrays, format, overwrite, group, is_background=False)()


def save_async(
    target: str | os.PathLike[str],
    arrays: Any,
    *,
    format: str = "safetensors",
    overwrite: bool = False,
    group: Any = None,
) -> BackgroundWork[None]:
    """Save in the background, while the program goes on: `save` with the same arguments.

    The arrays of this moment are saved. Programs may free them (`donate=`); their memory
    stays until they are written. Do not write into their shards meanwhile. Over processes, the
    first call makes a process group for saves, and a save ends before the next begins: wait
    for `result()` on every process.

    Returns:
        The handle of the work. `result()` waits for its end, and raises what the save raised.
    """
    work = _prepare(target, arrays, format, overwrite, group, is_background=True)
    return BackgroundWork(work, None)


def _prepare(
    target: str | os.PathLike[str],
    arrays: Any,
    format: str,
    overwrite: bool,
    group: Any,
    is_background: bool,
) -> Callable[..., None]:
    """Return a function that writes the arrays; ranks have moved all that it needs."""
    if _is_over_processes(arrays):
        # Imported here, because these modules import torch.
        from reshard.spmd.arrays.box_save import agreed_save, prepare_box_save
        from reshard.torch.storage.writer import StorageWriter

        # If only one rank raised, the others would wait for it.
        with agreed_save(target, format, overwrite, group):
            named = _check_arrays(arrays)
            writer = StorageWriter(target, format=format, overwrite=overwrite)
        boxes = {name: _find_shards(x) for name, x in named.items()}
        return prepare_box_save(writer, boxes, group, is_background)
    named = _check_arrays(arrays)
    saved = {name: _find_shards(x) for name, x in named.items()}
    if not saved:
        raise UsageError(f"no arrays to save in {target}; give at least one")
    if group is not None:
        raise UsageError(f"group={group!r} for arrays of one process; leave it out")
    folder = as_path(target)
    if not isinstance(folder, RemotePath):
        with translate_os_errors("make the folder of a new checkpoint", folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
    # The shards are read when the checkpoint is written, so a background save keeps them alive.
    held = hold_arrays(
        {
            name: (
                kind.dtype,
                kind.layout,
                {rank: named[name].runner.library.numpy(shard) for rank, shard in shards.items()},
            )
            for name, (kind, shards) in saved.items()
        }
    )
    planned = plan_conversion(held, folder, to="full", format=format)

    def write(
        progress: ProgressFunction | None = None, stop: threading.Event | None = None
    ) -> None:
        run_conversion(planned, overwrite=overwrite, restart=True, progress=progress, stop=stop)

    return write


def _is_over_processes(tree: Any) -> bool:
    """Return whether any array of a tree (or a new array, if it has none) is over processes."""
    runners = [leaf.runner for _, leaf in leaves(tree) if isinstance(leaf, ArrayValue)]
    return not all(runner.has_every_shard for runner in runners or [runner_for()])


def _check_arrays(tree: Any) -> dict[str, ArrayValue]:
    """Return the arrays of a tree, by name. Raises UsageError if they cannot be saved together."""
    named = dict(_list_arrays(tree))
    runners = {x.runner for x in named.values()}
    if any(runner.is_abstract for runner in runners):
        raise UsageError(
            "arrays without elements cannot be saved; save outside functions that are traced, what "
            "they return"
        )
    if len({runner.has_every_shard for runner in runners}) > 1:
        raise UsageError(
            "arrays of one process and arrays over processes in one save; save them one by one"
        )
    return named


def _list_arrays(tree: Any, kinds: tuple[type, ...] = (ArrayValue,)) -> Iterator[tuple[str, Any]]:
    """Return the arrays of a tree, by name. Raises UsageError for values that are not arrays."""
    seen: set[str] = set()
    for keys, leaf in keyed_leaves(tree):
        if leaf is None:
            continue
        name = ".".join(map(str, keys))
        if not name:
            raise UsageError(
                f"a {type(leaf).__name__} without a name; give a dictionary: {{'w': array}}"
            )
        if not isinstance(leaf, kinds):
            raise UsageError(
                f"{name!r} is {leaf!r}, a {type(leaf).__name__}; an array in shards was expected: "
                "sp.array makes one"
            )
        if name in seen:
            raise UsageError(
                f"two arrays are named {name!r}, since keys have dots in them; rename one"
            )
        seen.add(name)
        yield name, leaf


def _find_shards(x: Any) -> SavedArray:
    """Return the shards of an array without pending sums, detached from gradients."""
    x = x.reduced()
    if not x.runner.has_every_shard and _count_boxes(x.type) > _MAX_BOXES:
        # The same axes, by which each part is a single interval.
        dims = [DimSpec(dim.axes) for dim in x.type.spec.dim_specs]
        x = x.shard(ShardingSpec(x.type.spec.mesh, dims))
    shards = [shard.detach() if hasattr(shard, "detach") else shard for shard in x._shards]
    return SavedArray(x.type, dict(zip(_find_ranks(x.type, x.runner), shards, strict=True)))


def _find_ranks(kind: ArrayType, runner: Runner) -> tuple[int, ...]:
    """Return the ranks whose shards are here, as numbered by the array's layout."""
    # Without a mesh every rank has the same array, which counts as the first rank's.
    return (0,) if kind.spec is None else tuple(runner.ranks(kind.spec.mesh))


def _count_boxes(kind: ArrayType) -> int:
    """Return the maximum number of boxes of an array on a rank."""
    if kind.spec is None:
        return 1
    layout = kind.layout
    return max(math.prod(map(len, layout.cell_runs(cell))) for cell in range(layout.cells))


def load(source: str | os.PathLike[str] | Checkpoint, like: Any, *, cast: bool = False) -> Any:
    """Load arrays of a checkpoint, in the shardings of others.

    Each rank reads its own part, from a checkpoint of any format, cut in any way. Nothing is sent
    between ranks.

    Args:
        source: a checkpoint, or where it is.
        like: lists, tuples and dictionaries of arrays, whose places are the tensors' names
            (`layers.0.up`); or `sp.abstract(shape, dtype, spec)` in their place, which takes no
            memory. None stays None.
        cast: cast tensors of another element type; else they are refused.

    Returns:
        The same lists, tuples and dictionaries, with the arrays that were loaded. Tensors that are
        in the checkpoint alone are left out.

    Raises:
        CheckpointError: no checkpoint; tensors that it lacks, or of another shape or type.
        UsageError: a value that is not an array, two arrays of the same name.
        RunError: files that cannot be read.

    >>> import tempfile, reshard, reshard.spmd as sp
    >>> mesh, folder = reshard.DeviceMesh.of(x=2), tempfile.mkdtemp()
    >>> sp.save(f"{folder}/step-1", {"up": sp.arange(6, spec=reshard.spec(mesh, "x"))})
    >>> columns = reshard.spec(reshard.DeviceMesh.of(y=3), "y")
    >>> found = sp.load(f"{folder}/step-1", {"up": sp.abstract((6,), "int64", columns)})
    >>> found["up"].shards[2].tolist()
    [4, 5]
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    targets = {
        name: _Wanted(settled(x), runner_for())
        if isinstance(x, ArrayType)
        else _Wanted(settled(x.type), runner_for() if x.runner.is_abstract else x.runner)
        for name, x in _list_arrays(like, (ArrayValue, ArrayType))
    }
    _check_stored(checkpoint, {name: target.type for name, target in targets.items()}, cast)
    # All tensors that a rank needs are read together.
    layouts: dict[int, dict[str, Layout]] = {}
    for name, target in targets.items():
        for rank in target.ranks:
            layouts.setdefault(rank, {})[name] = target.type.layout
    parts = {rank: load_parts(checkpoint, own, rank) for rank, own in layouts.items()}
    # Lazily, and with `pop`: each part is freed once its array is made, before the next is cast.
    arrays = (
        target.make({rank: parts[rank].pop(name) for rank in target.ranks}, checkpoint[name].dtype)
        for name, target in targets.items()
    )
    return replaced(like, lambda leaf: None if leaf is None else next(arrays))


class _Wanted(NamedTuple):
    """A record of an array to load: its type, without pending sums, and the ranks of its shards."""

    type: ArrayType
    runner: Runner

    @property
    def ranks(self) -> tuple[int, ...]:
        return _find_ranks(self.type, self.runner)

    def make(self, shards: dict[int, Any], dtype: DType) -> Any:
        """Return the array, from shards of an element type."""
        shape, spec = self.type.shape, self.type.spec
        if spec is None:
            result = array(shards[0], runner=self.runner)
        else:
            result = from_shards(shards, shape, spec, dtype=dtype, runner=self.runner)
        return result if dtype is self.type.dtype else astype(result, self.type.dtype)


def _check_stored(checkpoint: Checkpoint, named: dict[str, ArrayType], cast: bool) -> None:
    """Raise CheckpointError where tensors are missing or others, with all that is wrong."""
    wrong = []
    for name, kind in named.items():
        stored = checkpoint.tensors.get(name)
        expected = f"{kind.dtype} {list(kind.shape)}"
        if stored is None:
            wrong.append(f"{name!r} is not there")
        elif tuple(stored.shape) != kind.shape:
            wrong.append(f"{name!r} is {stored.dtype} {list(stored.shape)}, not {expected}")
        elif stored.dtype is not kind.dtype and not cast:
            wrong.append(
                f"{name!r} is {stored.dtype} {list(stored.shape)}, not {expected} (cast=True casts)"
            )
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.folder}: {'; '.join(wrong[:_SHOWN])}{more}; give arrays like those that "
            "were saved"
        )
