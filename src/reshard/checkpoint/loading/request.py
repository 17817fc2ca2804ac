"""Loading by a request: one rank's arrays, sharded by a mesh and rules, a recipe or a strategy.

The layouts are equal to those that a conversion with the same request writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from reshard._validation import check_used
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.plan import (
    choose_recipe_by_default,
    name_source,
    place_tensors,
    take_source,
)
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.loading.arrays import load_layouts
from reshard.checkpoint.options import ConversionRequest, LoadOptions, find_options
from reshard.errors import UsageError
from reshard.layout import Layout

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import LoadArguments


def load(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    layouts: Mapping[str, Layout] | None = None,
    rank: int = 0,
    **arguments: Unpack[LoadArguments],
) -> dict[str, NDArray[Any]]:
    """Load one rank's arrays from a checkpoint of any format and sharding.

    Only the bytes that the rank needs are read, and at most a twentieth more. There are two
    exceptions, in which adjacent ranges are read together with the bytes between them: ranges of
    less than 512 bytes of a tensor, and ranges of at most a page (4 KiB) of many tensors.

    Args:
        checkpoint: a checkpoint, or its path.
        layouts: by tensor name, for some or all tensors; their slots are ranks. Without them, the
            other arguments determine how all tensors are sharded.
        rank: the rank whose part to load.
        **arguments: the fields of `LoadOptions`; and those of a `ConversionRequest` that do not
            change elements or files, such as `to`, `rules` and `recipe`, without which tensors are
            whole.

    Returns:
        The array of each tensor that the rank holds a part of; padding is zero.

    Raises:
        CheckpointError: a tensor that is not in the checkpoint.
        RecipeError: rules or a recipe that do not fit.
        UsageError: layouts together with options of a `ConversionRequest`; a layout of another
            shape, or a partial layout; a value that is not a layout; an invalid rank, type or
            number of readers.
        ShardError: an array in `out` that does not fit, or cannot be written.
        RunError: a file that cannot be read; `stop` was set (`InterruptedRunError`). Arrays in
            `out` may be filled in part then.

    >>> import tempfile, numpy as np, reshard
    >>> arrays = {0: {"w": np.arange(8).reshape(2, 4)}, 1: {"w": np.arange(8, 16).reshape(2, 4)}}
    >>> mesh = reshard.DeviceMesh.of(tp=2)
    >>> held = reshard.checkpoint.describe_ranks(arrays, mesh, rules=["w=tp, -"])
    >>> reshard.checkpoint.load(held, to="tp=4", rules=["w=-, tp"], rank=1)["w"].tolist()
    [[1], [5], [9], [13]]
    """
    request: dict[str, Any] = {**arguments}
    own = [name for name in LoadOptions.field_names if name in request]
    options = LoadOptions(**{name: request.pop(name) for name in own})
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    if layouts is None:
        checkpoint, layouts = _find_layouts(checkpoint, rank, request)
    elif request:
        raise UsageError(
            f"layouts, and {next(iter(request))!r} too; both specify how tensors are sharded, "
            "leave one of them out"
        )
    return load_layouts(checkpoint, layouts, rank, options)


def _find_layouts(
    checkpoint: Checkpoint, rank: int, arguments: dict[str, Any]
) -> tuple[Checkpoint, Mapping[str, Layout]]:
    """Return the checkpoint in the requested names, and the layout of each of its tensors."""
    for name, field in find_options(ConversionRequest).items():
        if name in arguments and not field.metadata["is_loaded"]:
            value = arguments.pop(name)
            reader = "`load` returns elements as they are stored, and only `convert` reads it"
            check_used(f"{name}={value!r}", value == field.default, reader)
    if arguments.get("to") is None and arguments.get("layout") is None:
        arguments["to"] = "full"
    request = ConversionRequest(**arguments)
    if isinstance(rank, int | np.integer) and rank >= request.ranks:
        raise UsageError(
            f"rank={rank} with to={request.to_text!r}; expected a rank from 0 to "
            f"{request.ranks - 1}"
        )
    taken = take_source(request, checkpoint)
    taken.expect_readable()
    request = choose_recipe_by_default(request, taken)
    named = name_source(request, taken)
    tensors, _, _ = place_tensors(request, named)
    return named.checkpoint, {name: tensor.layout for name, tensor in tensors.items()}
