"""Checkpoints on disk: open them, convert them, compare them.

::

    checkpoint = reshard.checkpoint.open("llama-3-8b")
    report = reshard.checkpoint.convert("llama-3-8b", "llama-tp4", to="tp=4")
    assert reshard.checkpoint.compare("llama-3-8b", "llama-tp4").is_same
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from reshard._lazy import attach
from reshard.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.checkpoint.comparison import (
        Comparison,
        Difference,
        DigestReport,
        check_digests,
        compare,
    )
    from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
    from reshard.checkpoint.conversion.conversion import Conversion, ConversionReport
    from reshard.checkpoint.conversion.plan import plan_conversion
    from reshard.checkpoint.conversion.run import run_conversion
    from reshard.checkpoint.deltas.apply import apply, plan_application
    from reshard.checkpoint.deltas.create import DeltaReport, diff
    from reshard.checkpoint.deltas.delta_file import Delta, read_delta
    from reshard.checkpoint.engines.rank_parameters import load_parameters
    from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
    from reshard.checkpoint.formats.registry import register_format
    from reshard.checkpoint.formats.write_plan import (
        NewCheckpoint,
        NewFile,
        PlannedTensor,
        WritePlan,
    )
    from reshard.checkpoint.keywords import ConvertArguments
    from reshard.checkpoint.loading.arrays import read_tensor
    from reshard.checkpoint.loading.background import BackgroundWork
    from reshard.checkpoint.loading.rank_arrays import describe_ranks
    from reshard.checkpoint.loading.request import load
    from reshard.checkpoint.naming.selection import open_selected, select
    from reshard.checkpoint.options import (
        CompareOptions,
        ConversionRequest,
        DiffOptions,
        RunOptions,
    )
    from reshard.checkpoint.pretrained.conversion import compare_pretrained, plan_for_pretrained
    from reshard.checkpoint.processes import OneProcess, running_processes
    from reshard.checkpoint.storage.threads import Progress, ProgressFunction
    from reshard.checkpoint.training.state import TrainingState, find_training_state
    from reshard.layout import Layout

    open = open_selected

__all__ = [
    "BackgroundWork",
    "Capability",
    "Checkpoint",
    "CheckpointFormat",
    "CompareOptions",
    "Comparison",
    "Conversion",
    "ConversionReport",
    "ConversionRequest",
    "Delta",
    "DeltaReport",
    "DiffOptions",
    "Difference",
    "DigestReport",
    "Listing",
    "NewCheckpoint",
    "NewFile",
    "OneProcess",
    "PlannedTensor",
    "Progress",
    "ProgressFunction",
    "RunOptions",
    "StoredFile",
    "StoredTensor",
    "TrainingState",
    "WritePlan",
    "apply",
    "check_digests",
    "compare",
    "compare_pretrained",
    "convert",
    "convert_async",
    "describe_ranks",
    "diff",
    "find_training_state",
    "load",
    "load_async",
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

# Attributes are imported on first use: the command uses few of them and has to start quickly.
__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.checkpoint.comparison": [
            "check_digests",
            "compare",
            "Comparison",
            "Difference",
            "DigestReport",
        ],
        "reshard.checkpoint.contents": ["Checkpoint", "StoredFile", "StoredTensor"],
        "reshard.checkpoint.conversion.conversion": ["Conversion", "ConversionReport"],
        "reshard.checkpoint.conversion.plan": ["plan_conversion"],
        "reshard.checkpoint.conversion.run": ["run_conversion"],
        "reshard.checkpoint.deltas.apply": ["apply", "plan_application"],
        "reshard.checkpoint.deltas.create": ["DeltaReport", "diff"],
        "reshard.checkpoint.deltas.delta_file": ["Delta", "read_delta"],
        "reshard.checkpoint.engines.rank_parameters": ["load_parameters"],
        "reshard.checkpoint.formats.format": ["Capability", "CheckpointFormat", "Listing"],
        "reshard.checkpoint.formats.opening": ["open_checkpoint"],
        "reshard.checkpoint.formats.registry": ["register_format", "shipped_formats"],
        "reshard.checkpoint.formats.write_plan": [
            "NewCheckpoint",
            "NewFile",
            "PlannedTensor",
            "WritePlan",
        ],
        "reshard.checkpoint.keywords": ["ConvertArguments"],
        "reshard.checkpoint.loading.arrays": ["read_tensor"],
        "reshard.checkpoint.loading.background": ["BackgroundWork"],
        "reshard.checkpoint.loading.rank_arrays": ["describe_ranks"],
        "reshard.checkpoint.loading.request": ["load"],
        "reshard.checkpoint.naming.selection": ["open_selected as open", "select"],
        "reshard.checkpoint.options": [
            "CompareOptions",
            "ConversionRequest",
            "DiffOptions",
            "RunOptions",
        ],
        "reshard.checkpoint.pretrained.conversion": ["compare_pretrained", "plan_for_pretrained"],
        "reshard.checkpoint.processes": ["OneProcess", "running_processes"],
        "reshard.checkpoint.storage.threads": ["Progress", "ProgressFunction"],
        "reshard.checkpoint.training.state": ["find_training_state", "TrainingState"],
    },
    renamed={"Arrangement": "WritePlan", "Holding": "Capability"},
)


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    request: ConversionRequest | None = None,
    **arguments: Unpack[ConvertArguments],
) -> ConversionReport:
    """Convert a checkpoint to another layout or format.

    The new checkpoint appears at `target` whole, or not at all. A `request`, or its fields as
    keywords (see `ConversionRequest`), specifies what to write: `to="tp=2"`. Other keywords specify
    how it is run (see `RunOptions`): `threads=2`.

    Raises:
        CheckpointError: a source that cannot be used.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target that exists.
        RunError: a failure while running; the same call continues.
    """
    from reshard.checkpoint.conversion.plan import plan_conversion
    from reshard.checkpoint.conversion.run import run_conversion
    from reshard.checkpoint.options import split_arguments

    asked, options = split_arguments(arguments)
    return run_conversion(plan_conversion(source, target, request, **asked), options)


def convert_async(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    request: ConversionRequest | None = None,
    *,
    progress: ProgressFunction | None = None,
    **arguments: Any,
) -> BackgroundWork[ConversionReport]:
    """Convert in the background: takes the arguments of `convert`; the result is its report.

    The conversion is planned before this function returns, so that errors in arguments are raised
    here. Use `cancel()` of the handle instead of `stop` to end the conversion; a second, equal call
    continues it.
    """
    from reshard.checkpoint.conversion.plan import plan_conversion
    from reshard.checkpoint.conversion.run import run_conversion
    from reshard.checkpoint.loading.background import BackgroundWork
    from reshard.checkpoint.options import split_arguments

    asked, options = split_arguments(arguments)
    if options.stop is not None:
        raise UsageError("convert_async with stop; leave it out: cancel() of the handle ends it")
    conversion = plan_conversion(source, target, request, **asked)

    def run(**handles: Any) -> ConversionReport:
        return run_conversion(conversion, options.replace(**handles))

    return BackgroundWork(run, progress)


def load_async(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    layouts: Mapping[str, Layout] | None = None,
    rank: int = 0,
    *,
    progress: ProgressFunction | None = None,
    **arguments: Any,
) -> BackgroundWork[dict[str, NDArray[Any]]]:
    """Load in the background: takes the arguments of `load`; the result is its arrays."""
    from reshard.checkpoint.loading.background import BackgroundWork
    from reshard.checkpoint.loading.request import load

    return BackgroundWork(partial(load, checkpoint, layouts, rank, **arguments), progress)
