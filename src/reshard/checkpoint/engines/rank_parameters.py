"""A rank's parameters as tensors of a checkpoint, bound to the bytes that they are made of.

An engine's layout says of each parameter which region of which source it takes, and a checkpoint
where in which file each source lies. Together, a parameter is boxes at places of files::

    gate_up_proj, rank 1 of 2            model.safetensors
    0:2   gate_proj, rows 2:4   ---->    byte 4096 + 2 rows
    2:4   up_proj, rows 2:4     ---->    byte 8192 + 2 rows

1. A source that is whole in one file has its regions there, whatever their strides.
2. One that is cut over ranks is boxes. A region is followed along their dimensions, and each box
   has the part of it that lies inside.
3. What is not copied is in a file of its own (`made_elements`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.blocks.fusing import list_stored_boxes
from reshard.checkpoint.blocks.spans import is_dense
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.engines.made_elements import MOST_BYTES, MadeFile, MadeRegion, check_steps
from reshard.errors import RecipeError
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts import (
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourcePiece,
    SourceTensor,
)
from reshard.recipes.engine_layouts.source_layouts import find_steps
from reshard.text import first_text


@dataclass
class RankParameters:
    """What ranks hold of a checkpoint: tensors, and the files of what is made."""

    checkpoint: Checkpoint
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    made: dict[str, MadeFile] = field(default_factory=dict)

    def add(self, layout: RankLayout, prefix: str = "") -> None:
        """Add a rank's parameters, of tied ones the first by name, under names with a prefix.

        Raises:
            RecipeError: a parameter that cannot be had from the checkpoint: computed in a way that
                is not known, not filled, or of a source that is cut otherwise than along its
                dimensions.
        """
        left_out = {name for group in layout.tied for name in sorted(group)[1:]}
        unfilled = [
            name
            for name, parameter in layout.parameters.items()
            if parameter.unfilled and name not in left_out
        ]
        if unfilled:
            raise RecipeError(
                f"{len(unfilled)} parameters of rank {layout.rank} are not filled by the loader "
                f"(first: {unfilled[0]}), and what they hold then is the engine's; let it load the "
                "checkpoint as it is"
            )
        for name, parameter in layout.parameters.items():
            if name not in left_out:
                self.add_parameter(parameter, f"{prefix}{name}")

    def add_parameter(self, parameter: ParameterLayout, name: str | None = None) -> None:
        """Add one parameter, by default under its own name. Raises RecipeError as `add` does."""
        name = parameter.name if name is None else name
        self.tensors[name] = self._bind(name, parameter)

    @property
    def bound(self) -> Checkpoint:
        """The checkpoint with these tensors in the place of its own."""
        # Bytes may be read by several ranks: checksums of whole files say nothing of that.
        return dataclasses.replace(
            self.checkpoint,
            tensors=self.tensors,
            checksums=(),
            derived={**self.checkpoint.derived, **self.made},
        )

    def _bind(self, name: str, parameter: ParameterLayout) -> StoredTensor:
        itemsize = parameter.dtype.itemsize_bytes
        boxes: list[Box] = []
        places: list[FileRange] = []
        views: list[View] = []

        def put(box: Box, place: FileRange, strides: tuple[int, ...]) -> None:
            view = View(0, strides)
            boxes.append(box)
            places.append(place)
            views.append(View.row_major(box.shape) if is_dense(view, box.shape) else view)

        made: list[tuple[Box, str | None, View | None, tuple[str, ...], float]] = []
        for piece in parameter.pieces:
            stored = self.checkpoint[piece.source]
            steps = tuple(step for step in piece.steps if not step.startswith("bits as "))
            if steps:
                made.append((piece.box, piece.source, piece.view, steps, 0.0))
            elif stored.dtype.itemsize_bytes != itemsize:
                raise RecipeError(
                    f"{name!r} takes {piece.source!r} of {stored.dtype.name} as "
                    f"{parameter.dtype.name} by its bits; let the engine load it as it is"
                )
            else:
                for box, place, strides in _resolve(name, piece, stored):
                    put(box, place, strides)
        for one in parameter.computed:
            if one.view is None or len(one.sources) != 1:
                raise RecipeError(
                    f"{name!r} is computed by {', '.join(one.operations)} of "
                    f"{', '.join(one.sources)}, not element by element; let the engine load the "
                    "checkpoint as it is"
                )
            made.append((one.box, one.sources[0], one.view, one.operations, 0.0))
        made += [(one.box, None, None, (), one.value) for one in parameter.constants]
        if made:
            start = 0
            regions = []
            file = f"{name}/made"
            for box, source, view, steps, value in made:
                check_steps(name, steps)
                regions.append(MadeRegion(start, box.shape, source, view, steps, value))
                put(box, FileRange(file, start * itemsize), View.row_major(box.shape).strides)
                start += box.elements
            if start * itemsize > MOST_BYTES:
                casts = sorted({step for _, _, _, steps, _ in made for step in steps})
                raise RecipeError(
                    f"{name!r} has {start * itemsize:,} bytes that are made by "
                    f"{', '.join(casts) or 'one value'}, more than {MOST_BYTES:,}; convert the "
                    "checkpoint to the engine's element type first"
                )
            first = next((self._file_of(r.source) for r in regions if r.source), None)
            first = first or self.checkpoint.files[0].name
            self.made[file] = MadeFile(
                name, parameter.dtype, tuple(regions), self.checkpoint, first
            )
            self.made[file].expect_computable()
        layout = Layout.from_boxes(parameter.shape, [(0, box) for box in boxes], 1)
        binding = Binding(layout, {0: tuple(places)}, {0: tuple(views)})
        return StoredTensor(name, parameter.dtype, binding)

    def _file_of(self, source: str) -> str:
        tensor = self.checkpoint[source]
        return tensor.file_range(tensor.stored_slots[0]).path


def _resolve(
    name: str, piece: SourcePiece, stored: StoredTensor
) -> Iterator[tuple[Box, FileRange, tuple[int, ...]]]:
    """The boxes of a parameter that a piece fills, with their places in files and strides there."""
    itemsize = stored.dtype.itemsize_bytes
    cells = list(list_stored_boxes(stored))
    if len(cells) == 1 and is_dense(View(0, cells[0].strides), stored.shape):
        place = cells[0].place
        start = place.start_bytes + piece.view.offset * itemsize
        yield piece.box, FileRange(place.path, start), piece.view.strides
        return
    found = find_steps(stored.shape, piece.box.shape, piece.view.offset, piece.view.strides)
    if found is None:
        raise RecipeError(
            f"{name!r} takes elements of {piece.source!r} across its dimensions, and that is cut "
            "over ranks in this checkpoint; make it whole first (--to full)"
        )
    first, along = found
    for cell in cells:
        low, high = cell.box.start, cell.box.stop
        begins: list[int] = []
        ends: list[int] = []
        strides: list[int] = []
        at_first = list(first)
        for size, known in zip(piece.box.shape, along, strict=True):
            begin, end, stride = 0, size, 0
            if known is not None:
                d, by = known
                begin = max(0, -((first[d] - low[d]) // by))
                end = min(size, -((first[d] - high[d]) // by))
                stride = by * cell.strides[d]
                at_first[d] = first[d] + by * begin
            begins.append(begin)
            ends.append(end)
            strides.append(stride)
        is_inside = all(a <= i < b for i, a, b in zip(at_first, low, high, strict=True))
        if is_inside and all(a < b for a, b in zip(begins, ends, strict=True)):
            further = sum(
                (i - a) * stride for i, a, stride in zip(at_first, low, cell.strides, strict=True)
            )
            place = FileRange(cell.place.path, cell.place.start_bytes + further * itemsize)
            box = Box(
                tuple(a + b for a, b in zip(piece.box.start, begins, strict=True)),
                tuple(a + b for a, b in zip(piece.box.start, ends, strict=True)),
            )
            yield box, place, tuple(strides)


def check_sources(layout: EngineLayout, checkpoint: Checkpoint) -> None:
    """Raise RecipeError where a layout is not of this checkpoint."""
    problems = []
    sources: Mapping[str, SourceTensor] = layout.sources
    for name, source in sources.items():
        if name not in checkpoint.tensors:
            problems.append(f"{name}: not in the checkpoint")
            continue
        stored = checkpoint.tensors[name]
        if (stored.dtype, stored.shape) != (source.dtype, source.shape):
            problems.append(
                f"{name}: {stored.dtype.name} {list(stored.shape)}, in the layout "
                f"{source.dtype.name} {list(source.shape)}"
            )
    if problems:
        raise RecipeError(
            f"the layout of {layout.engine} is of another checkpoint than {checkpoint.folder}: "
            f"{first_text(problems, 3, '; ')}; derive it again"
        )


def rank_parameters(
    checkpoint: Checkpoint, ranks: Mapping[str, RankLayout] | RankLayout
) -> RankParameters:
    """The parameters of ranks as tensors of a checkpoint.

    Args:
        checkpoint: the sources.
        ranks: the layout of one rank, or of several by the prefix of their names.

    Raises:
        RecipeError: what cannot be had from the checkpoint, see `RankParameters.add`.
    """
    found = RankParameters(checkpoint)
    for prefix, rank in ({"": ranks} if isinstance(ranks, RankLayout) else ranks).items():
        found.add(rank, prefix)
    return found
