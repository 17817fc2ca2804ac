"""Cuts by an engine's layout: each rank of the target holds what that engine's rank reads.

Tensors keep their own names and shapes; an engine's layout says of each which part every rank
takes, heads that are held several times and all. What no rank reads is not lost: rank 0 has it.
"""

from __future__ import annotations

from reshard.checkpoint.contents import Checkpoint, missing_box
from reshard.errors import RecipeError
from reshard.layout import Layout
from reshard.recipes.engine_layouts import EngineLayout


def cut_by_engine(
    checkpoint: Checkpoint, engine: EngineLayout
) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """The layout of every tensor over the engine's ranks, and notes for the user.

    Raises:
        RecipeError: a layout for another checkpoint: names or shapes that differ.
    """
    check_sources(checkpoint, engine)
    layouts = engine.source_layouts()
    slots = max(engine.mesh.devices) + 1
    found: dict[str, Layout] = {}
    whole: list[str] = []
    completed: dict[Layout, Layout | None] = {}
    for name, tensor in checkpoint.tensors.items():
        layout = layouts[name]
        if layout not in completed:
            is_there = missing_box(layout) is None
            completed[layout] = layout if is_there else None
        kept = completed[layout]
        if kept is None:
            whole.append(name)
            holders = sorted({0, *layout.holders})
            kept = Layout.whole(tensor.shape, holders, slots)
        found[name] = kept
    notes = []
    if whole:
        notes.append(
            f"{len(whole)} tensors (first: {whole[0]}) are not, or not wholly, read by "
            f"{engine.engine}: they are whole, on rank 0 and on the ranks that read some of them"
        )
    return found, tuple(notes)


def check_sources(checkpoint: Checkpoint, engine: EngineLayout) -> None:
    """Raise RecipeError where an engine's layout is that of another checkpoint."""
    told = f"the layout of {engine.engine} {engine.version} for {engine.mesh.text}"
    missing = [name for name in checkpoint.tensors if name not in engine.sources]
    if missing:
        raise RecipeError(
            f"{len(missing)} tensors of {checkpoint.folder} (first: {missing[0]!r}) are not in "
            f"{told}; derive it from this checkpoint"
        )
    absent = [name for name in engine.sources if name not in checkpoint.tensors]
    if absent:
        raise RecipeError(
            f"{told} has {len(absent)} tensors (first: {absent[0]!r}) that {checkpoint.folder} has "
            "not; derive it from this checkpoint"
        )
    for name, tensor in checkpoint.tensors.items():
        shape = engine.sources[name].shape
        if shape != tensor.shape:
            raise RecipeError(
                f"{name!r} has shape {list(tensor.shape)} in {checkpoint.folder}, and "
                f"{list(shape)} in {told}; derive it from this checkpoint"
            )
