"""Tensors that are computed from stored ones, a block at a time.

A `ComputedTensor` fills any box of itself, reading boxes of its sources as it goes. What it reads
at once is bounded, so that a conversion knows its memory before it begins::

    source files --(read_box)--> inputs --(fill)--> block --> target files
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks.block_io import BlockReader, OpenFiles, Watch, Workspace
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest
from reshard.checkpoint.changes.source_digests import SourceDigests
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.files.source_file import SourceFile
from reshard.dtypes import DType
from reshard.elements import CastCounts
from reshard.layout import Box

#: What the arithmetic of one block takes beside its buffers.
SCRATCH_BYTES = 8 * 1024 * 1024

# The bare elements of a box of a source, valid until the same source is read again.
ReadBox = Callable[[int, Box], NDArray[Any]]


class ComputedTensor(Protocol):
    """A tensor that is computed from others.

    Attributes:
        dtype: of its elements.
        shape: of it.
        sources: what it is computed from.
    """

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[StoredTensor, ...]: ...

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """The most that is read at once of each source for a box."""

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the bare elements of a box into `out`, of its shape."""


class ComputedReader:
    """Reads the blocks of a computed tensor, as a `BlockReader` reads those of a stored one."""

    def __init__(
        self,
        tensor: ComputedTensor,
        files: OpenFiles[SourceFile],
        watch: Watch | None = None,
        note: Callable[[CastCounts], None] | None = None,
        digests: SourceDigests | None = None,
    ) -> None:
        self._digests = digests
        self.tensor = tensor
        self.grid = BlockGrid.of(tensor.shape, tensor.dtype.itemsize_bytes)
        self._readers = [BlockReader(source, files, watch) for source in tensor.sources]
        self._note = note

    @property
    def span_bytes(self) -> int:
        """The most bytes of a shard that are in memory at once."""
        return max((reader.span_bytes for reader in self._readers), default=0)

    @property
    def input_bytes(self) -> tuple[int, ...]:
        """The most that is in memory of each source, for the largest block."""
        return self.tensor.input_bytes(self.grid.box(0)) if self.grid.count else ()

    def read_checked(
        self, index: int, workspace: Workspace, at: int = 0
    ) -> tuple[memoryview, bytes]:
        """The bytes of block `index`, valid until the next call, and their digest.

        They begin at `at` of the workspace's memory for blocks.

        Raises:
            RunError: a file that cannot be read.
            DigestError: bytes of a source that are not those that were written.
        """
        box = self.grid.box(index)
        size_bytes = box.elements * self.grid.itemsize_bytes
        memory = workspace.block.memory[at : at + size_bytes]
        out = np.frombuffer(memory, dtype=self.tensor.dtype.storage).reshape(box.shape)

        def read(source: int, part: Box) -> NDArray[Any]:
            reader = self._readers[source]
            elements = reader.read_box(part, workspace.inputs[source], workspace.span)
            if self._digests is not None:
                self._digests.add(reader.tensor, part, elements)
            return elements

        counts = self.tensor.fill(box, out, read)
        if self._note is not None and counts != CastCounts():
            self._note(counts)
        return memory, block_digest(memory)
