"""Tensors whose parts several tensor-parallel ranks have, collected and joined.

1. What each rank has of a tensor is noted: the shape of its part, and pieces of it in files.
2. When all are there, the ranks' parts are joined as `tensor_parts` says. Parts of a parameter that
   several stages of a pipeline have are copies.
3. All copies are bound, and compared where tensors are read (`reshard.checkpoint.copy_checks`). Of
   averaged parameters all elements are compared here, since a mean of different ones is not made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.binding import View
from reshard.checkpoint.blocks.spans import is_dense
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
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.storage.filesystem import read_up_to
from reshard.errors import CheckpointError, FormatError


@dataclasses.dataclass(frozen=True)
class _RankPart:
    """A part of a tensor that a rank has."""

    shape: Shape
    pieces: tuple[StoredPiece, ...]


class PartCollector:
    """Collects the parts of `joiner.ranks` tensor-parallel ranks, and joins them."""

    def __init__(self, folder: Path, collector: TensorCollector, joiner: Joiner) -> None:
        self._folder, self._collector, self._joiner = folder, collector, joiner
        self._parts: dict[str, dict[tuple[int, int], _RankPart]] = {}
        self._parameters: dict[str, str] = {}

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
        self._add(parameter, name, mp, _RankPart(archived.shape, pieces))

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
            self._add_joined(name, joins[key], found)

    def _add_joined(
        self, name: str, join: Join, found: Mapping[tuple[int, int], _RankPart]
    ) -> None:
        if join.is_averaged:
            self._compare(name, list(found.values()))
        cells = []
        for (_, rank), part in found.items():
            if part.shape != join.parts[rank]:
                continue
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

    def _compare(self, name: str, parts: Sequence[_RankPart]) -> None:
        """Raise FormatError for copies that differ and whose mean counts."""
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
