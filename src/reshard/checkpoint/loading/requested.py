"""Loading by a request: one rank's arrays, cut as a mesh and rules, a recipe or a strategy say.

The layouts are those that a conversion of the same request would have; nothing is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from reshard._validation import check_used
from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.defaults import choose_recipe_by_default
from reshard.checkpoint.conversion.placement import place_tensors
from reshard.checkpoint.conversion.request import (
    ConversionRequest,
    CutArguments,
    RequestArguments,
)
from reshard.checkpoint.conversion.source_names import name_source
from reshard.checkpoint.conversion.source_selection import take_source
from reshard.checkpoint.files.progress import ProgressFunction
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.loading.arrays import load_layouts
from reshard.errors import UsageError
from reshard.layout import Layout


def load(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    layouts: Mapping[str, Layout] | None = None,
    rank: int = 0,
    *,
    out: Mapping[str, NDArray[Any]] | None = None,
    threads: int | None = None,
    files: OpenFiles[SourceFile] | None = None,
    dtype: str | None = None,
    readers_on_host: int = 1,
    progress: ProgressFunction | None = None,
    stop: threading.Event | None = None,
    **arguments: Unpack[CutArguments],
) -> dict[str, NDArray[Any]]:
    """One rank's arrays, from a checkpoint of any format and cut.

    Only the bytes that the rank needs are read, and at most a twentieth more, but where what
    is needed of a tensor lies in pieces of less than 512 bytes, or of many tensors in pieces of at
    most a page (4 KiB) each: those that are near together are read with what lies between them.

    Args:
        checkpoint: a checkpoint, or where it is.
        layouts: by tensor name, for some or all tensors; their slots are ranks. Without them, the
            other arguments say how all tensors are cut.
        rank: whose part is wanted.
        out: arrays to fill instead of new ones, of the local shape and the tensor's dtype.
        threads: how many read at a time; 4 when None, and 16 from an address.
        files: those of the checkpoint (`open_sources`), for who counts what is read, and who then
            closes them.
        dtype: of floating-point tensors of 16 bits or more: bf16, fp16 or fp32; that of each tensor
            when None.
        readers_on_host: how many processes of this host load from the checkpoint at the same time,
            each its own rank's part: from an address, bytes that several of them need are asked
            for once, and shared in at most 256 MiB of memory for all of them. Each waits up to
            10 s for the others. Files of this machine are shared by the page cache.
        progress: called with a `Progress` after every piece that was read.
        stop: an event that ends the work when it is set.
        to, rules, recipe, options, strategy, source_names, target_names, layout, allow, include,
            exclude, strip_prefix, rename, select: as in a `ConversionRequest`. Tensors are whole
            where nothing says how they are cut.

    Returns:
        The array of each tensor that the rank holds a part of; padding is zero.

    Raises:
        CheckpointError: a tensor that is not in the checkpoint.
        RecipeError: rules or a recipe that do not fit.
        UsageError: layouts and, beside them, what to cut for; a layout of another shape, a partial
            one, or none; a rank, a type or a number of readers that cannot be.
        ShardError: an array in `out` that does not fit, or cannot be written.
        RunError: a file that cannot be read; `stop` was set (`InterruptedRunError`). Arrays in
            `out` may be filled in part then; others are not returned.

    >>> import tempfile, numpy as np, reshard
    >>> arrays = {0: {"w": np.arange(8).reshape(2, 4)}, 1: {"w": np.arange(8, 16).reshape(2, 4)}}
    >>> mesh = reshard.DeviceMesh.of(tp=2)
    >>> held = reshard.checkpoint.describe_ranks(arrays, mesh, rules=["w=tp, -"])
    >>> reshard.checkpoint.load(held, to="tp=4", rules=["w=-, tp"], rank=1)["w"].tolist()
    [[1], [5], [9], [13]]
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    if layouts is None:
        checkpoint, layouts = _find_layouts(checkpoint, rank, arguments)
    elif arguments:
        raise UsageError(
            f"layouts, and beside them {next(iter(arguments))!r}; they say how tensors are cut, "
            "leave one of them out"
        )
    return load_layouts(
        checkpoint,
        layouts,
        rank,
        out=out,
        threads=threads,
        files=files,
        dtype=dtype,
        readers_on_host=readers_on_host,
        progress=progress,
        stop=stop,
    )


def _find_layouts(
    checkpoint: Checkpoint, rank: int, arguments: CutArguments
) -> tuple[Checkpoint, Mapping[str, Layout]]:
    """The checkpoint in the names that are asked for, and the layout of each of its tensors."""
    for name, value in arguments.items():
        if name in RequestArguments.__annotations__ and name not in CutArguments.__annotations__:
            is_default = value == getattr(ConversionRequest, name)
            reader = "`load` returns elements as they are stored, and only `convert` reads it"
            check_used(f"{name}={value!r}", is_default, reader)
    if arguments.get("to") is None and arguments.get("layout") is None:
        arguments = {**arguments, "to": "full"}
    request = ConversionRequest(**arguments)
    if isinstance(rank, int | np.integer) and rank >= request.ranks:
        raise UsageError(
            f"rank {rank} of {request.to_text!r}, whose ranks are 0 to {request.ranks - 1}"
        )
    taken = take_source(request, checkpoint)
    taken.expect_readable()
    request = choose_recipe_by_default(request, taken)
    named = name_source(request, taken)
    placed = place_tensors(request, named)
    return named.checkpoint, {name: one.layout for name, one in placed.tensors.items()}
