"""Checkpoints on disk: open them, convert them, compare them.

::

    checkpoint = reshard.checkpoint.open("llama-3-8b")
    report = reshard.checkpoint.convert("llama-3-8b", "llama-tp4", to="tp=4", recipe="llama")
    assert reshard.checkpoint.compare("llama-3-8b", "llama-tp4").is_same
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from reshard.checkpoint.comparison import (
    Comparison,
    Difference,
    DigestReport,
    check_digests,
    compare,
)
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.conversion.conversion import (
    DEFAULT_MEMORY_BYTES,
    Conversion,
    plan_conversion,
)
from reshard.checkpoint.conversion.processes import OneProcess, running_processes
from reshard.checkpoint.conversion.run import (
    ConversionReport,
    Progress,
    ProgressFunction,
    run_conversion,
)
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.loading import load, read_tensor
from reshard.checkpoint.renaming import Names
from reshard.mesh import DeviceMesh
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule

__all__ = [
    "Checkpoint",
    "Comparison",
    "Conversion",
    "ConversionReport",
    "Difference",
    "DigestReport",
    "OneProcess",
    "Progress",
    "StoredFile",
    "StoredTensor",
    "check_digests",
    "compare",
    "convert",
    "load",
    "open",
    "plan_conversion",
    "read_tensor",
    "run_conversion",
    "running_processes",
]

open = open_checkpoint


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    to: str | int | DeviceMesh,
    rules: Iterable[str | Rule] = (),
    recipe: str | os.PathLike[str] | Recipe | None = None,
    options: Mapping[str, str] | Iterable[str] = (),
    strategy: str | None = None,
    format: str | None = None,
    replicas: str = "once",
    most_file_bytes: int | None = None,
    source_names: Names | None = None,
    target_names: Names | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    threads: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: ProgressFunction | None = None,
) -> ConversionReport:
    """Convert a checkpoint into one that is cut for other ranks.

    The new checkpoint appears at `target` whole, or not at all. See `plan_conversion` for what
    can be asked for and `run_conversion` for how it is run.

    Raises:
        CheckpointError: a source that cannot be used.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target that exists.
        RunError: a failure while running; the same call continues.
    """
    conversion = plan_conversion(
        source,
        target,
        to=to,
        rules=rules,
        recipe=recipe,
        options=options,
        strategy=strategy,
        format=format,
        replicas=replicas,
        most_file_bytes=most_file_bytes,
        source_names=source_names,
        target_names=target_names,
    )
    return run_conversion(
        conversion,
        memory_bytes=memory_bytes,
        threads=threads,
        overwrite=overwrite,
        restart=restart,
        progress=progress,
    )
