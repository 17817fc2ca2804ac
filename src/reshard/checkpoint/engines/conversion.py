"""Conversions for engines: every rank's parameters, written to files that the engine loads.

    checkpoint  +  layout of the engine  -->  a plan, run block by block as any other

Each parameter of a rank is a whole tensor of its own, bound to its bytes in the source
(`rank_parameters`). So the run, its journal and its memory are the same as in other conversions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from reshard.checkpoint.architectures.checking import check_architecture
from reshard.checkpoint.blocks.tensor_columns import shapes_of, types_of
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.engine_states import LAYOUT_NAME
from reshard.checkpoint.conversion.plan import open_apart, plan_whole_files
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.engines.rank_parameters import check_sources, rank_parameters
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.formats.vllm_sharded_state import NAME, rank_prefix
from reshard.checkpoint.naming.selection import TensorSelection, list_left_out, select_from
from reshard.checkpoint.options import ConversionRequest
from reshard.checkpoint.pretrained.model_folder import (
    CONFIG,
    config_bytes,
    most_common_type,
    with_dtype,
)
from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.plans.serialization import to_json
from reshard.recipes.engine_layouts import EngineLayout
from reshard.recipes.overrides import parse_allowed
from reshard.text import count_text


def plan_for_vllm(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    layout: EngineLayout,
    *,
    most_file_bytes: int | None = None,
    allow: Iterable[str] = (),
    selection: TensorSelection | None = None,
) -> Conversion:
    """Plan to write files that vLLM loads with `load_format="sharded_state"`.

    The files of each rank have the parameters that the rank holds after its own loader has run, and
    before weights are processed. vLLM processes weights after loading these files too.

    Args:
        source: a checkpoint, or its location.
        target: the folder that will hold the files.
        layout: the layout of vLLM's ranks, as returned by `reshard.torch.vllm.layouts`.
        most_file_bytes: the maximum size of a file.
        allow: accept differences from the tensors of config.json's architecture: `incomplete`,
            `unknown`.
        selection: take only some tensors of the source, or take them by other names.

    Raises:
        UsageError: the layout of another engine, or of several replicas, which files do not
            distinguish.
        RecipeError: a layout of another checkpoint, or parameters that cannot be derived from it.
        CheckpointError: a source that cannot be used.
    """
    if layout.engine != "vllm":
        raise UsageError(f"a layout of {layout.engine!r}; give one of vllm")
    sizes = dict(zip(layout.mesh.axis_names, layout.mesh.shape, strict=True))
    if sizes.get("dp", 1) > 1:
        raise UsageError(
            f"a layout for {layout.mesh.text}: vLLM's sharded_state has no names for replicas; "
            "derive one with dp=1, and give each replica the same files"
        )
    source_checkpoint, target = open_apart(source, target)
    selection = selection or TensorSelection()
    checkpoint = select_from(source_checkpoint, selection)
    check_sources(layout, checkpoint)
    config = read_config(checkpoint)
    checked: tuple[str, ...] = ()
    if config is not None and config.get("model_type") is not None:
        allowed = parse_allowed(allow)
        checked = check_architecture(
            shapes_of(checkpoint.tensors),
            types_of(checkpoint.tensors),
            config,
            checkpoint.folder,
            allow=allowed,
            left_out=list_left_out(source_checkpoint, selection),
        )
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    ranks = {
        f"{rank_prefix(rank_layout.rank, tp, pp)}/": rank_layout for rank_layout in layout.ranks
    }
    parameters = rank_parameters(checkpoint, ranks)
    checkpoint = expect_equal_copies(parameters.bound)
    request = ConversionRequest(to="full", format=NAME, most_file_bytes=most_file_bytes)
    write_plan = plan_whole_files(request, checkpoint)
    text = to_json(layout)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    # Write the layout to the target too, so that the model's own tensors can be restored.
    companions = tuple(name for name in checkpoint.carried if name != LAYOUT_NAME)
    notes = (*checkpoint.notes, *checked, *_describe_casts(layout))
    rewritten = {LAYOUT_NAME: text.encode()}
    dtype = most_common_type(checkpoint)
    if CONFIG in companions and dtype is not most_common_type(source_checkpoint):
        rewritten[CONFIG] = config_bytes(with_dtype(read_config(source_checkpoint) or {}, dtype))
        notes += (f"{CONFIG} says {dtype}, the type of the files",)
    if dtype is not None and dtype.name == "float32":
        notes += (
            "vLLM computes a float32 model in 16 bits unless it is told otherwise: start it with "
            "--dtype float32 for these files",
        )
    checkpoint = checkpoint.replace(carried=(*companions, LAYOUT_NAME), notes=notes)
    resolved: dict[str, Any] = {
        "for": f"vllm {layout.version}",
        "to": layout.mesh.text,
        "layout": digest,
    }
    resolved |= selection.to_json()
    return Conversion(checkpoint, target, write_plan, request, resolved, rewritten=rewritten)


def _describe_casts(layout: EngineLayout) -> Iterator[str]:
    """Describe the tensors whose elements the engine's loader rounds to another type."""
    cast: dict[tuple[DType, DType], dict[str, None]] = {}
    for rank in layout.ranks:
        for parameter in rank.parameters.values():
            for piece in parameter.pieces:
                kinds = layout.sources[piece.source].dtype, parameter.dtype
                is_cast = any(step.startswith("to ") for step in piece.steps)
                if is_cast and kinds[1] is not kinds[0] and not _is_wider(*kinds):
                    cast.setdefault(kinds, {})[piece.source] = None
    for (before, after), names in cast.items():
        yield (
            f"{count_text(len(names), 'tensor')} (first: {next(iter(names))}) are rounded from "
            f"{before} to {after}, as vLLM's loader does; --dtype chooses another type"
        )


def _is_wider(before: DType, after: DType) -> bool:
    return after.itemsize_bytes > before.itemsize_bytes
