"""Conversions for engines: what every rank of one holds, written to files that it loads.

    checkpoint  +  layout of the engine  -->  a plan, run block by block as any other

A parameter of a rank is a tensor of its own, whole, and bound to the bytes of the source that it is
made of (`rank_parameters`). So the run, its journal and its memory are those of conversions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.engines.states import LAYOUT_NAME
from reshard.checkpoint.conversion.planning import arrange_whole, open_apart
from reshard.checkpoint.conversion.request import ConversionRequest
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.engines.rank_parameters import check_sources, rank_parameters
from reshard.checkpoint.formats.vllm_sharded_state import NAME, rank_prefix
from reshard.errors import UsageError
from reshard.plans.documents.serialization import to_json
from reshard.recipes.engine_layouts import EngineLayout


def plan_for_vllm(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    layout: EngineLayout,
    *,
    most_file_bytes: int | None = None,
) -> Conversion:
    """Plan to write what vLLM loads with `load_format="sharded_state"`.

    Every rank's files have, tensor by tensor, what the rank holds when its own loader has run and
    before weights are processed after loading, which vLLM does with these as well.

    Args:
        source: a checkpoint, or where it is.
        target: the folder that will hold the files.
        layout: of vLLM's ranks, as `reshard.torch.vllm.layouts` gives it.
        most_file_bytes: begin a new part beyond so many bytes.

    Raises:
        UsageError: another engine's layout, or one of several replicas: files do not tell them
            apart.
        RecipeError: a layout of another checkpoint, or parameters that cannot be had from it.
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
    checkpoint, target = open_apart(source, target)
    check_sources(layout, checkpoint)
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    ranks = {f"{rank_prefix(one.rank, tp, pp)}/": one for one in layout.ranks}
    found = rank_parameters(checkpoint, ranks)
    checkpoint = expect_equal_copies(found.bound)
    request = ConversionRequest(to="full", format=NAME, most_file_bytes=most_file_bytes)
    arrangement = arrange_whole(request, checkpoint)
    text = to_json(layout)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    # Beside the files, so that the model's own tensors can be made of them again.
    beside = tuple(name for name in checkpoint.carried if name != LAYOUT_NAME)
    checkpoint = dataclasses.replace(checkpoint, carried=(*beside, LAYOUT_NAME))
    resolved = {"for": f"vllm {layout.version}", "to": layout.mesh.text, "layout": digest}
    rewritten = {LAYOUT_NAME: text.encode()}
    return Conversion(checkpoint, target, arrangement, request, resolved, rewritten=rewritten)
