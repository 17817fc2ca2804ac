"""Comparisons of a training checkpoint with a model folder, such as one of the Hub.

Both are planned as what `from_pretrained` would load (`conversion`): weights alone, in the
architecture's names, tied ones once, without rows that pad the vocabulary. What would be written of
the one is then compared with the other, block by block, and nothing is written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Unpack

from reshard.checkpoint.comparison import Comparison, compare
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.planning import unwritten_target
from reshard.checkpoint.pretrained.conversion import plan_for_pretrained
from reshard.checkpoint.storage.threads import ProgressFunction

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import ComparePretrainedArguments


def compare_pretrained(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    model: str | os.PathLike[str] | Checkpoint,
    *,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    **arguments: Unpack[ComparePretrainedArguments],
) -> Comparison:
    """Compare what a training checkpoint is as a model folder with a model folder that is there.

    Args:
        checkpoint: a checkpoint, or where it is.
        model: a folder with config.json and whole weights, in the architecture's names.
        threads: at most so many at a time; 4 when None, and 16 from an address.
        progress: called after every block.
        config, recipe, source_names, dtype, adapters, source_layout, include, exclude,
            strip_prefix, rename, select: for `checkpoint`, as in `plan_for_pretrained`. The config
            is the model's where none is given.

    Raises:
        CheckpointError: a checkpoint or a model that cannot be used, or that has not all weights.
        RecipeError: names that could be meant in several ways, or that do not fit the recipe.
        UsageError: arguments that cannot be.
        RunError: a file cannot be read.
    """
    place = model.folder if isinstance(model, Checkpoint) else model
    arguments = {**arguments, "config": arguments.get("config") or place}
    ours = _plan(checkpoint, **arguments)
    theirs = _plan(model, config=arguments["config"], recipe=arguments.get("recipe"))
    return compare(ours, theirs, threads=threads, progress=progress)


def _plan(checkpoint: str | os.PathLike[str] | Checkpoint, **arguments: Any) -> Conversion:
    """Return the conversion to a model folder; it is not run, so that its target is only a name."""
    folder = checkpoint.folder if isinstance(checkpoint, Checkpoint) else checkpoint
    return plan_for_pretrained(checkpoint, unwritten_target(folder), **arguments)
