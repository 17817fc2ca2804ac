"""A delta applied: a new checkpoint of the base and its changes, of any cut and format.

It is a conversion (`reshard.checkpoint.conversion`) of the base with the delta (`patching`): blocks
are read, changed, digested and written; it is staged, resumed and put in its place as any other.
Without a cut and a format of its own, the new checkpoint has those of the base.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.conversion import Conversion, ConversionReport
from reshard.checkpoint.conversion.planning import (
    expect_one_file,
    find_file_name,
    open_apart,
    plan_conversion,
)
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.conversion.source_selection import select_from
from reshard.checkpoint.deltas.delta_file import Delta, read_delta
from reshard.checkpoint.deltas.patching import PatchedCheckpoint, check_files, patch
from reshard.checkpoint.files.folders import refusals_explained
from reshard.checkpoint.formats.format import Capability, CheckpointFormat
from reshard.checkpoint.formats.registry import find_format, written_names
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    PlannedTensor,
    WritePlan,
    find_stored_replicas,
)
from reshard.checkpoint.naming.selection import TensorSelection
from reshard.checkpoint.options import ConversionRequest, split_arguments
from reshard.errors import UsageError
from reshard.layout import Layout

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import ConvertArguments, RequestArguments

PathLike = str | os.PathLike[str]
# Of a request: other elements, or other names than the delta has.
_OTHERS = (
    *("dtype", "dequantize", "quantize", "source_names", "target_names"),
    *("strip_prefix", "rename"),
)


def plan_application(
    base: PathLike | Checkpoint,
    deltas: PathLike | Delta | Sequence[PathLike | Delta],
    target: PathLike,
    request: ConversionRequest | None = None,
    **arguments: Unpack[RequestArguments],
) -> Conversion:
    """Plan the conversion of a checkpoint with deltas applied; reads headers, writes nothing.

    Args:
        base: a checkpoint, or where it is.
        deltas: one delta, or several that are applied one after the other.
        target: the folder that will hold the new one.
        request: what to cut for, and how; or its keywords (see `ConversionRequest`). With neither,
            the new checkpoint has the cut and the format of the base.

    Raises:
        CheckpointError: a base or a delta that cannot be used; a delta of another checkpoint.
        DigestError: the same, by digests that are known beforehand.
        UsageError: arguments that contradict each other, or that change elements or names.
    """
    many = deltas if isinstance(deltas, Sequence) and not isinstance(deltas, str) else [deltas]
    opened = [one if isinstance(one, Delta) else read_delta(one) for one in many]
    if not opened:
        raise UsageError("no delta to apply; name at least one")
    checkpoint, target = open_apart(base, target)
    # Deltas have the names of the model that was selected when they were made.
    chosen = arguments.pop("select", None) if request is None else request.select
    checkpoint = select_from(checkpoint, TensorSelection(select=chosen))
    request = None if request is None else dataclasses.replace(request, select=None)
    with refusals_explained("look at the target", target):
        for delta in opened:
            if target.resolve() in delta.path.resolve().parents:
                raise UsageError(
                    f"the delta {delta.path} lies inside the target {target}, and would be deleted "
                    "with it; choose another target"
                )
    patched = patch(checkpoint, opened)
    check_files(checkpoint, patched)
    given = {name: value for name, value in arguments.items() if value not in (None, (), False)}
    if request is None and not (given.keys() - {"replicas", "most_file_bytes"}):
        conversion = _keep_cut(
            checkpoint,
            patched,
            target,
            arguments.get("replicas"),
            arguments.get("most_file_bytes"),
        )
    else:
        if request is None:
            request = ConversionRequest(**arguments)
        _check_request(request)
        conversion = plan_conversion(patched.checkpoint, target, request)
    _check_names(conversion.write_plan, patched)
    computed = {
        name: one for name, one in patched.computed.items() if name in conversion.write_plan.tensors
    }
    return dataclasses.replace(
        conversion,
        computed={**conversion.computed, **computed},
        rewritten={**conversion.rewritten, **patched.rewritten},
        resolved={
            **conversion.resolved,
            "deltas": tuple(one.digest.hex() for one in opened),
            **({} if chosen is None else {"select": chosen}),
        },
        digest_hint=(
            f"The delta is for another state of {checkpoint.folder}, or one of the two is damaged"
        ),
    )


def apply(
    base: PathLike | Checkpoint,
    deltas: PathLike | Delta | Sequence[PathLike | Delta],
    target: PathLike,
    request: ConversionRequest | None = None,
    **arguments: Unpack[ConvertArguments],
) -> ConversionReport:
    """Write a checkpoint with deltas applied.

    The arguments are those of `plan_application`, and as keywords those of `run_conversion`.

    Raises:
        CheckpointError: a base or a delta that cannot be used; a delta of another checkpoint.
        DigestError: a base that is not what the delta was made from; a damaged delta.
        UsageError: arguments that contradict each other; a target that exists.
        RunError: a failure while running; the same call continues.
    """
    asked, running = split_arguments(arguments)
    return run_conversion(plan_application(base, deltas, target, request, **asked), **running)


def _check_request(request: ConversionRequest) -> None:
    """Raise UsageError for a request of other elements or names."""
    for name in _OTHERS:
        if getattr(request, name):
            raise UsageError(
                f"{name}={getattr(request, name)!r} while a delta is applied; apply it, and "
                "convert the result"
            )


def _check_names(write_plan: WritePlan, patched: PatchedCheckpoint) -> None:
    for name in write_plan.tensors:
        if name not in patched.checkpoint.tensors:
            raise UsageError(
                f"{name!r} is no name of the base: other names cannot be given while a delta is "
                "applied; apply it, and convert the result"
            )
    for file in write_plan.files:
        if file.stored.name in patched.checkpoint.carried:
            raise UsageError(
                f"{file.stored.name!r} is a file beside the tensors and one of the new tensors; "
                "choose another format"
            )


def _keep_cut(
    base: Checkpoint,
    patched: PatchedCheckpoint,
    target: Path,
    replicas: str | None,
    most_file_bytes: int | None,
) -> Conversion:
    """The conversion that leaves cut, format and, when None, the copies as they are."""
    format = _expect_written(base)
    is_whole = Capability.SHARDS not in format.capabilities
    checkpoint = patched.checkpoint
    placed = format.assign_layouts(checkpoint, base.mesh, base.ranks) or {}
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        layout, spec = tensor.layout, tensor.spec
        if name in placed or is_whole:
            layout, spec = placed.get(name, Layout.whole(tensor.shape, [0], 1)), None
        tensors[name] = PlannedTensor(tensor.dtype, layout, spec)
    to = "full" if is_whole else base.mesh or base.ranks
    if replicas is None and Capability.REPLICAS in format.capabilities:
        replicas = find_stored_replicas(base.tensors)
    request = ConversionRequest(
        to=to, format=format.name, replicas=replicas, most_file_bytes=most_file_bytes
    )
    file_name = find_file_name(request, target, base)
    write_plan = format.plan_write(
        NewCheckpoint(
            tensors,
            base.mesh,
            checkpoint.metadata,
            checkpoint.items,
            checkpoint.paths,
            checkpoint.attributes,
            request.stored_replicas,
            most_file_bytes,
            checkpoint.values,
            file_name=file_name,
        )
    )
    expect_one_file(file_name, target, write_plan)
    resolved = {"to": request.to_text, "cut": "as the base", "recipe": None}
    return Conversion(
        checkpoint, target, write_plan, request, resolved, is_single_file=file_name is not None
    )


def _expect_written(base: Checkpoint) -> CheckpointFormat:
    """The format of the base, if it can be written."""
    format = find_format(base.format)
    if format is None or format.name not in written_names():
        raise UsageError(
            f"{base.folder} is of format {base.format}, which is read only; say what to cut for "
            f"(to) and in which format: {', '.join(written_names())}"
        )
    return format
