"""Checkpoints on disk: open them, convert them, compare them.

::

    checkpoint = reshard.checkpoint.open("llama-3-8b")
    report = reshard.checkpoint.convert("llama-3-8b", "llama-tp4", to="tp=4", recipe="llama")
    assert reshard.checkpoint.compare("llama-3-8b", "llama-tp4").is_same
"""

from __future__ import annotations

import os
from typing import Unpack

from reshard.checkpoint.comparison import (
    Comparison,
    Difference,
    DigestReport,
    check_digests,
    compare,
)
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.conversion.conversion import (
    DEFAULT_EXTRA_BYTES,
    Conversion,
)
from reshard.checkpoint.conversion.planning import plan_conversion
from reshard.checkpoint.conversion.processes import OneProcess, running_processes
from reshard.checkpoint.conversion.request import ConversionRequest, RequestArguments
from reshard.checkpoint.conversion.run import (
    ConversionReport,
    Progress,
    ProgressFunction,
    run_conversion,
)
from reshard.checkpoint.conversion.source_selection import select
from reshard.checkpoint.deltas.application import apply, plan_application
from reshard.checkpoint.deltas.delta_file import Delta, read_delta
from reshard.checkpoint.deltas.making import DeltaReport, diff
from reshard.checkpoint.engines.loading import load_parameters
from reshard.checkpoint.formats.arrangement import (
    Arrangement,
    NewCheckpoint,
    NewFile,
    PlannedTensor,
)
from reshard.checkpoint.formats.format import CheckpointFormat, Holding
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.registry import register_format, shipped_formats
from reshard.checkpoint.loading import load, read_tensor
from reshard.checkpoint.pretrained.conversion import plan_for_pretrained

__all__ = [
    "Arrangement",
    "Checkpoint",
    "CheckpointFormat",
    "Comparison",
    "Conversion",
    "ConversionReport",
    "ConversionRequest",
    "Delta",
    "DeltaReport",
    "Difference",
    "DigestReport",
    "Holding",
    "NewCheckpoint",
    "NewFile",
    "OneProcess",
    "PlannedTensor",
    "Progress",
    "StoredFile",
    "StoredTensor",
    "apply",
    "check_digests",
    "compare",
    "convert",
    "diff",
    "load",
    "load_parameters",
    "open",
    "plan_application",
    "plan_conversion",
    "plan_for_pretrained",
    "read_delta",
    "read_tensor",
    "register_format",
    "run_conversion",
    "running_processes",
    "select",
]

open = open_checkpoint

# Imported here, so that the first call does not take the time.
shipped_formats()


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    request: ConversionRequest | None = None,
    *,
    extra_bytes: int = DEFAULT_EXTRA_BYTES,
    threads: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: ProgressFunction | None = None,
    **arguments: Unpack[RequestArguments],
) -> ConversionReport:
    """Convert a checkpoint into one that is cut for other ranks.

    The new checkpoint appears at `target` whole, or not at all. What to cut for, and how, is a
    `request`, or its keywords (see `ConversionRequest`): `to`, `rules`, `recipe`, `options`,
    `strategy`, `format`, `replicas`, `most_file_bytes`, `source_names`, `target_names`, `layout`,
    `include`, `exclude`, `strip_prefix`, `rename`.
    The other arguments say how it is run (see `run_conversion`).

    Raises:
        CheckpointError: a source that cannot be used.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target that exists.
        RunError: a failure while running; the same call continues.
    """
    conversion = plan_conversion(source, target, request, **arguments)
    return run_conversion(
        conversion,
        extra_bytes=extra_bytes,
        threads=threads,
        overwrite=overwrite,
        restart=restart,
        progress=progress,
    )
