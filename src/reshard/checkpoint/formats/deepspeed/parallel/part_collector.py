"""Tensors whose parts several tensor-parallel ranks have, collected and joined.

1. What each rank has of a tensor is noted: the shape of its part, and pieces of it in files.
2. When all are there, the ranks' parts are joined as `tensor_parts` says. Of a parameter that
   several stages of a pipeline have, the first one's counts.
3. Of copies the first rank's is read. Weights that are copies are compared by their checksums; of
   averaged parameters all elements are, since a mean of different ones is not made here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from reshard.binding import View
from reshard.checkpoint.blocks.strided_spans import is_dense
from reshard.checkpoint.files.descriptors import read_up_to
from reshard.checkpoint.formats.deepspeed.parallel.tensor_parts import (
    Join,
    Joiner,
    Shape,
    expect_elements,
    find_cells,
)
from reshard.checkpoint.formats.deepspeed.stored_tensors import (
    StoredCell,
    StoredPiece,
    TensorCollector,
)
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.errors import CheckpointError, FormatError
from reshard.text.quantities import count_text


@dataclasses.dataclass(frozen=True)
class _RankPart:
    """What a rank has of a tensor; `whole` is the tensor of its file, where that is all of it."""

    shape: Shape
    pieces: tuple[StoredPiece, ...]
    whole: ArchivedTensor | None = None


class PartCollector:
    """Collects the parts of `joiner.ranks` tensor-parallel ranks, and joins them.

    `notes` are for the user, of copies that differ.
    """

    def __init__(self, folder: Path, collector: TensorCollector, joiner: Joiner) -> None:
        self._folder, self._collector, self._joiner = folder, collector, joiner
        self._parts: dict[str, dict[tuple[int, int], _RankPart]] = {}
        self._parameters: dict[str, str] = {}
        self._differing: list[str] = []
        self.notes: list[str] = []

    def add_pieces(
        self, parameter: str, name: str, mp: int, shape: Shape, pieces: Sequence[StoredPiece]
    ) -> None:
        """Note the pieces of a rank's part of a tensor, which is cut as `parameter` is."""
        self._add(parameter, name, mp, _RankPart(shape, tuple(pieces)))

    def add_whole(
        self, parameter: str, name: str, mp: int, file: str, archived: ArchivedTensor, slot: int
    ) -> None:
        """Note a rank's part of a tensor that is whole in a file."""
        if not is_dense(archived.view, archived.shape):
            raise FormatError(
                f"{self._folder / file}: the part of {name!r} is not row by row; save it again "
                "after `.contiguous()`"
            )
        elements = math.prod(archived.shape)
        flat = dataclasses.replace(
            archived, shape=(elements,), view=View(archived.view.offset, (1,))
        )
        pieces = (StoredPiece(slot, 0, elements, file, flat, 0),) if elements else ()
        self._add(parameter, name, mp, _RankPart(archived.shape, pieces, archived))

    def _add(self, parameter: str, name: str, mp: int, part: _RankPart) -> None:
        self._parameters[name] = parameter
        self._parts.setdefault(name, {}).setdefault(divmod(mp, self._joiner.ranks), part)

    def join(self) -> None:
        """Add all tensors to the collector.

        Raises:
            CheckpointError: parts that some ranks do not have.
            FormatError: parts that do not make a tensor.
        """
        joins: dict[tuple[str, tuple[Shape, ...]], Join] = {}
        for name, found in self._parts.items():
            stage = min(stage for stage, _ in found)
            missing = [r for r in range(self._joiner.ranks) if (stage, r) not in found]
            if missing:
                raise CheckpointError(
                    f"{self._folder} has no part of {name!r} of tensor-parallel rank "
                    f"{missing[0]}, which other ranks have; the files belong to different saves, "
                    "or one of a layer is missing"
                )
            parts = [found[stage, rank] for rank in range(self._joiner.ranks)]
            parameter = self._parameters[name]
            key = parameter, tuple(part.shape for part in parts)
            if key not in joins:
                joins[key] = self._joiner.join(*key)
                expect_elements(joins[key], self._joiner.label, parameter)
            self._add_joined(name, joins[key], parts)
        if self._differing:
            self.notes.append(
                f"{count_text(len(self._differing), 'parameter')} (first: {self._differing[0]}) "
                "should be copies on tensor-parallel ranks, and differ: those of the first rank "
                "are read"
            )

    def _add_joined(self, name: str, join: Join, parts: Sequence[_RankPart]) -> None:
        if join.copies:
            self._compare(name, join, parts)
        cells = []
        for rank, part in enumerate(parts):
            for slot, start, stop, file, buffer, offset in part.pieces:
                end = offset + stop - start
                if end > buffer.shape[0]:
                    raise FormatError(
                        f"{self._folder / file} has {buffer.shape[0]} elements where {end} were "
                        f"expected for {name!r}; the files belong to different saves"
                    )
                at = buffer.view.offset + offset
                for box, view in find_cells(join, rank, start, stop):
                    cells.append(
                        StoredCell(slot, box, View(at + view.offset, view.strides), file, buffer)
                    )
        if not cells:
            return
        cells.sort(key=lambda cell: cell.slot)
        self._collector.add_cells(name, join.shape, cells)

    def _compare(self, name: str, join: Join, parts: Sequence[_RankPart]) -> None:
        """Note copies that differ; raise FormatError for those whose mean counts."""
        if not join.is_averaged:
            sums = {part.whole.crc32 for part in parts if part.whole is not None}
            # Storages that others share say nothing of this tensor.
            if len(sums) > 1 and all(_is_alone(part) for part in parts):
                self._differing.append(name)
            return
        contents = {b"".join(map(self._read, part.pieces)) for part in parts}
        if len(contents) > 1:
            raise FormatError(
                f"{self._folder}: {name!r} differs between tensor-parallel ranks, and counts by "
                "its mean (parameter_to_average_patterns), which is not made here. Convert it with "
                "ds_to_universal, whose result is read"
            )

    def _read(self, piece: StoredPiece) -> bytes:
        """The elements of a piece."""
        buffer, path = piece.buffer, self._folder / piece.file
        itemsize_bytes = buffer.dtype.itemsize_bytes
        size_bytes = (piece.stop - piece.start) * itemsize_bytes
        try:
            with path.open("rb") as file:
                file.seek(buffer.start_bytes + (buffer.view.offset + piece.offset) * itemsize_bytes)
                content = read_up_to(file, size_bytes)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if len(content) < size_bytes:
            raise FormatError(f"{path} ends before the elements that it says it has")
        return content


def _is_alone(part: _RankPart) -> bool:
    whole = part.whole
    return (
        whole is not None
        and whole.crc32 is not None
        and whole.storage_bytes == math.prod(whole.shape) * whole.dtype.itemsize_bytes
    )
