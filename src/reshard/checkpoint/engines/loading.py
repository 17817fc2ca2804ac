"""One rank's parameters as an engine has them, read from a checkpoint of any format and cut."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.engines.rank_parameters import RankParameters, check_sources
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.loading.arrays import load_layouts
from reshard.checkpoint.options import LoadOptions
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.recipes.engine_layouts import EngineLayout
from reshard.recipes.engine_layouts.document import read_layout_file


def load_parameters(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    layout: EngineLayout | str | os.PathLike[str],
    rank: int = 0,
    *,
    names: Iterable[str] | None = None,
    out: Mapping[str, NDArray[Any]] | None = None,
    threads: int | None = None,
    readers_on_host: int = 1,
) -> dict[str, NDArray[Any]]:
    """The parameters of one rank of an engine, by the names that it gives them.

    Only the bytes that they are made of are read. What is cast, constant or computed element by
    element, by operations that are known, is made; what the engine's loader does not fill is left
    out, unless it is asked for by name.

    Args:
        checkpoint: a checkpoint, or where it is.
        layout: of the engine, or the file that has it (`reshard recipe derive`).
        rank: whose parameters are wanted.
        names: of those that are wanted; all that the loader fills when None.
        out: arrays to fill instead of new ones, of the parameters' shapes and dtypes.
        threads: how many read at a time.
        readers_on_host: how many processes of this host load their rank's part at the same time, as
            of `load`.

    Returns:
        Each parameter by its name; of those that share memory, all of them the same array.

    Raises:
        RecipeError: a layout of another checkpoint, or a parameter that cannot be had from it.
        UsageError: a rank or a name that the layout has not.
        ShardError: an array in `out` that does not fit, or cannot be written.
        CheckpointError, RunError: a checkpoint or a file that cannot be read.
    """
    if not isinstance(layout, EngineLayout):
        layout = read_layout_file(layout)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    check_sources(layout, checkpoint)
    own = layout.rank(rank)
    if names is None:
        wanted = [name for name, one in own.parameters.items() if not one.unfilled]
    else:
        wanted = list(names)
        for name in wanted:
            if name not in own.parameters:
                raise UsageError(f"rank {rank} of {layout.engine} has no parameter {name!r}")
            if own.parameters[name].unfilled:
                raise UsageError(
                    f"{layout.engine} does not fill all of {name!r} when it loads: what it holds "
                    "then is the engine's"
                )
    # Parameters that share memory are read once.
    first = {name: group[0] for group in own.tied for name in group}
    found = RankParameters(checkpoint)
    for name in dict.fromkeys(first.get(name, name) for name in wanted):
        found.add_parameter(own.parameters[name], name)
    bound = found.bound
    whole = {name: Layout.whole(one.shape, [0], 1) for name, one in bound.tensors.items()}
    if out is not None:
        out = {first.get(name, name): out[name] for name in reversed(wanted) if name in out}
    options = LoadOptions(out=out, threads=threads, readers_on_host=readers_on_host)
    arrays = load_layouts(bound, whole, 0, options)
    return {name: arrays[first.get(name, name)] for name in wanted}
