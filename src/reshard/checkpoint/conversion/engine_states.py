"""Engine layouts in conversions: which part of a model's tensor each rank holds, and back.

`shard_by_engine` gives each rank of the target the parts that the engine's rank reads; tensors keep
their names and shapes. A part that no rank reads is stored by rank 0.

`as_model` reads a layout the other way: from the parameters of an engine's ranks to the model's own
tensors. The layout specifies the source region that each part of a parameter is copied from, so a
source tensor is a set of boxes in the ranks' files::

    gate_up_proj, rank 1 of 2            up_proj
    0:2   gate_proj, rows 2:4
    2:4   up_proj, rows 2:4     ---->    rows 2:4: rows 2:4 of rank 1's gate_up_proj

1. A region is followed along the dimensions of its source. It is a box there, or a box for each
   step if it takes every second index.
2. A part that several ranks hold is read from the first. A part that no rank holds is missing.
3. A computed part is not a copy of its source and is refused by name, and so is a parameter of
   another shape or type than the loader fills, such as one that was repacked for a kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.contents import Checkpoint, StoredTensor, missing_box
from reshard.checkpoint.formats.vllm_sharded_state import NAME, rank_prefix
from reshard.errors import CoverageError, RecipeError
from reshard.layout import Box, Layout
from reshard.text import count_text

if TYPE_CHECKING:
    from reshard.recipes.engine_layouts import EngineLayout, RankLayout, SourcePiece, SourceTensor

#: The file with the layout of the ranks, in a state that reshard wrote.
LAYOUT_NAME = "reshard.engine-layout.json"
# Steps of a region that takes every second index: each is a box of its own.
_MAX_BOXES = 100_000


@dataclass
class _Source:
    """Where the parts of one source are: boxes of each rank, and their places and strides there."""

    boxes: dict[int, list[Box]] = field(default_factory=dict)
    places: dict[int, list[FileRange]] = field(default_factory=dict)
    views: dict[int, list[View]] = field(default_factory=dict)
    seen: set[Box] = field(default_factory=set)

    def add(self, rank: int, box: Box, place: FileRange, view: View) -> None:
        """Add a part, if no rank has it yet."""
        if box not in self.seen:
            self.seen.add(box)
            self.boxes.setdefault(rank, []).append(box)
            self.places.setdefault(rank, []).append(place)
            self.views.setdefault(rank, []).append(view)


def find_layout(checkpoint: Checkpoint) -> EngineLayout | None:
    """Return the layout that reshard wrote with a state, or None."""
    path: Path = checkpoint.folder / LAYOUT_NAME
    if checkpoint.format != NAME or not path.is_file():
        return None
    from reshard.recipes.engine_layouts.document import read_layout_file

    return read_layout_file(path)


def as_model(checkpoint: Checkpoint, layout: EngineLayout) -> Checkpoint:
    """Return the model's own tensors, bound to the files of the ranks' parameters.

    Args:
        checkpoint: what the ranks of an engine hold, of the format `vllm-sharded-state`.
        layout: of these ranks.

    Raises:
        RecipeError: another layout than that of these ranks; parameters that are not copies.
        CoverageError: a tensor of which the ranks have a part only.
    """
    if checkpoint.format != NAME:
        raise RecipeError(
            f"a layout of ranks for {checkpoint.folder}, which is of the format "
            f"{checkpoint.format}; it is for what an engine's ranks hold ({NAME})"
        )
    sizes = dict(zip(layout.mesh.axis_names, layout.mesh.shape, strict=True))
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    prefixes = {rank.rank: f"{rank_prefix(rank.rank, tp, pp)}/" for rank in layout.ranks}
    there = {name.partition("/")[0] for name in checkpoint.tensors}
    expected = {prefix.rstrip("/") for prefix in prefixes.values()}
    if there != expected:
        raise RecipeError(
            f"the layout is for {layout.mesh.text}, {count_text(len(expected), 'rank')}; "
            f"{checkpoint.folder} has the files of {', '.join(sorted(there))}"
        )
    sources: dict[str, _Source] = {name: _Source() for name in layout.sources}
    computed: dict[str, str] = {}
    used: set[str] = set()
    for rank in layout.ranks:
        stored = _find_parameters(checkpoint, rank, prefixes[rank.rank])
        used |= {tensor.name for tensor in stored.values()}
        _add_rank(rank, stored, layout.sources, sources, computed)
    tensors: dict[str, StoredTensor] = {}
    missing: list[str] = []
    for name, found in sources.items():
        if not found.boxes:
            if name in computed:
                raise _explain_computed(name, computed[name])
            missing.append(name)
            continue
        tensors[name] = _bind(name, layout, found, computed)
    notes = list(checkpoint.notes)
    if missing:
        notes.append(
            f"{count_text(len(missing), 'tensor')} of the model are on no rank, so they are not in "
            f"the target (first: {missing[0]})"
        )
    others = [name for name in checkpoint.tensors if name not in used]
    if others:
        notes.append(
            f"{count_text(len(others), 'tensor')} of the ranks are none that their loader fills, "
            f"and are left out (first: {others[0]})"
        )
    return checkpoint.replace(
        tensors=tensors,
        carried=tuple(name for name in checkpoint.carried if name != LAYOUT_NAME),
        checksums=(),
        notes=tuple(notes),
    )


def _find_parameters(
    checkpoint: Checkpoint, rank: RankLayout, prefix: str
) -> dict[str, StoredTensor]:
    """Return a rank's parameters in the state; of tied ones, one is there."""
    tied = {name: group for group in rank.tied for name in group}
    found: dict[str, StoredTensor] = {}
    for name, parameter in rank.parameters.items():
        names = (name, *sorted(tied.get(name, ())))
        stored = next(
            (checkpoint.tensors[prefix + name] for name in names if prefix + name in checkpoint),
            None,
        )
        if stored is None:
            raise RecipeError(
                f"{checkpoint.folder} has no {prefix + name!r}, which the layout's rank "
                f"{rank.rank} holds. Either the engine has put it into the form of a kernel after "
                "loading, and it cannot be taken apart again, or the layout is of another model; "
                "then derive it again"
            )
        if (stored.shape, stored.dtype) != (parameter.shape, parameter.dtype):
            raise RecipeError(
                f"{stored.name!r} is {stored.dtype.name} {list(stored.shape)}, and the loader "
                f"fills {parameter.dtype.name} {list(parameter.shape)}: it was changed after "
                "loading, as weights are for the kernels of quantised ones, and cannot be taken "
                "apart again"
            )
        found[name] = stored
    return found


def _add_rank(
    rank: RankLayout,
    stored: Mapping[str, StoredTensor],
    known: Mapping[str, SourceTensor],
    sources: Mapping[str, _Source],
    computed: dict[str, str],
) -> None:
    """Add the parts of sources that a rank's parameters are copies of."""
    for name, parameter in rank.parameters.items():
        tensor = stored[name]
        (slot,) = tensor.stored_slots
        place = tensor.file_range(slot)
        strides = View.row_major(tensor.shape).strides
        for part in parameter.computed:
            how = f"{name!r} is made of it by {', '.join(part.operations)}"
            computed |= {source: how for source in part.sources if source not in computed}
        for piece in parameter.pieces:
            changes = [step for step in piece.steps if not step.startswith("bits as ")]
            source = known[piece.source]
            if changes:
                computed.setdefault(piece.source, f"{name!r} is made of it by {', '.join(changes)}")
            elif source.dtype.itemsize_bytes != parameter.dtype.itemsize_bytes:
                computed.setdefault(piece.source, f"{name!r} has its bits in other elements")
            else:
                for box, offset, view in _list_boxes(name, piece, source.shape, strides):
                    start = place.start_bytes + offset * tensor.dtype.itemsize_bytes
                    at = FileRange(place.path, start)
                    sources[piece.source].add(rank.rank, box, at, view)


def _list_boxes(
    name: str, piece: SourcePiece, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[tuple[Box, int, View]]:
    """Yield the boxes of a source that a piece covers, with the offset of each in the parameter,
    and its strides there."""
    steps = View.row_major(shape).strides
    first = [piece.view.offset // s % n for s, n in zip(steps, shape, strict=True)]
    origin = sum(a * stride for a, stride in zip(piece.box.start, strides, strict=True))
    # For each dimension of the source: how many indices, every how many, and how far apart.
    along: dict[int, tuple[int, int, int]] = {}
    for size, stride, own in zip(piece.box.shape, piece.view.strides, strides, strict=True):
        if size == 1:
            continue
        at = next((d for d, n in enumerate(shape) if n > 1 and 0 < steps[d] <= stride), None)
        by, rest = divmod(stride, steps[at]) if at is not None else (0, 1)
        if at is None or rest or at in along or first[at] + by * (size - 1) >= shape[at]:
            raise RecipeError(
                f"{name!r} takes elements of {piece.source!r} across its dimensions; that is not "
                "taken apart here"
            )
        along[at] = (size, by, own)
    # Dimensions of which every second index is taken are gone through one by one.
    single = [d for d, (_, by, _) in along.items() if by > 1]
    if math.prod(along[d][0] for d in single) > _MAX_BOXES:
        raise RecipeError(f"{name!r} takes {piece.source!r} in more than {_MAX_BOXES} pieces")
    for indices in itertools.product(*(range(along[d][0]) for d in single)):
        start, stop, view = list(first), [a + 1 for a in first], [0] * len(shape)
        offset = origin
        for d, index in zip(single, indices, strict=True):
            _, by, own = along[d]
            start[d] += index * by
            stop[d] = start[d] + 1
            offset += index * own
        for d, (size, by, own) in along.items():
            if by == 1:
                stop[d] = start[d] + size
                view[d] = own
        yield Box(tuple(start), tuple(stop)), offset, View(0, tuple(view))


def _bind(
    name: str, layout: EngineLayout, found: _Source, computed: Mapping[str, str]
) -> StoredTensor:
    """Return a tensor of the model. Raises where the ranks do not have all of it."""
    source = layout.sources[name]
    boxes = [(rank, box) for rank, parts in sorted(found.boxes.items()) for box in parts]
    whole = Layout.from_boxes(source.shape, boxes, max(layout.mesh.devices) + 1)
    binding = Binding(
        whole,
        {rank: tuple(places) for rank, places in found.places.items()},
        {rank: tuple(views) for rank, views in found.views.items()},
    )
    tensor = StoredTensor(name, source.dtype, binding)
    try:
        _ = tensor.assembly
    except CoverageError:
        if name in computed:
            raise _explain_computed(name, computed[name]) from None
        raise
    return tensor


def _explain_computed(name: str, how: str) -> RecipeError:
    return RecipeError(
        f"{name!r} is not in what the ranks hold: {how}, which is not undone; take it from the "
        "model's own checkpoint"
    )


def shard_by_engine(
    checkpoint: Checkpoint, engine: EngineLayout
) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """Return the layout of every tensor over the engine's ranks, and notes for the user.

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
