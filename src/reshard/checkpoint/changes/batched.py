"""Batches of blocks as they will be: moved as they are, cast, or computed from others.

::

    moved       files --(one read)--> blocks
    cast        files --(one read)--> inputs --(one cast)--> blocks
    computed    files --(reads for each)--> inputs --> block, block, ...

All blocks of a batch are made in one way, and are written together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from reshard.checkpoint.blocks.batches import BatchReader, BlockMemory, Section, aligned_bytes
from reshard.checkpoint.blocks.block_io import OpenFiles, Watch, Workspace
from reshard.checkpoint.blocks.grid import block_digest
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.casts import cast_blocks
from reshard.checkpoint.changes.computed import ComputedReader, ComputedTensor
from reshard.checkpoint.changes.source_digests import SourceDigests
from reshard.checkpoint.files.source_file import SourceFile
from reshard.elements import CastCounts

#: Of each section, the digests of its blocks.
SectionDigests = list[list[bytes]]


class ChangedReader:
    """Reads batches of the blocks of `target`, from tensors `source` or as `computed` says.

    Args:
        source: the tensors that are moved or cast.
        target: all, as they will be.
        computed: the others, by name.
        files: of the source.
        watch: called with all that is read.
        note: called with what became of elements that the new type does not have.
        digests: compares what tensors are computed from with recorded digests.
    """

    def __init__(
        self,
        source: TensorColumns,
        target: TensorColumns,
        computed: Mapping[str, ComputedTensor],
        files: OpenFiles[SourceFile],
        watch: Watch | None = None,
        note: Callable[[CastCounts], None] | None = None,
        digests: SourceDigests | None = None,
    ) -> None:
        self._digests = digests
        self._target = target
        self._made = computed
        self._files, self._watch, self._note = files, watch, note
        self._reader = BatchReader(source, files, watch)
        # One reader a computed tensor, kept for as long as its blocks come up.
        self._computed = lru_cache(maxsize=64)(self._open_computed)

    def _open_computed(self, row: int) -> ComputedReader:
        made = self._made[self._target.names[row]]
        return ComputedReader(made, self._files, self._watch, self._note, self._digests)

    def read(
        self, read: Sequence[Section], written: Sequence[Section], workspace: Workspace
    ) -> tuple[list[BlockMemory], SectionDigests]:
        """The blocks of each section, valid until the next call, and their digests.

        Args:
            read: the sections of the source; none where blocks are computed.
            written: those of the target.
            workspace: where to.

        Raises:
            RunError: a file that cannot be read.
            DigestError: bytes that are not those that were written.
        """
        if not read:
            return self._compute(written, workspace)
        kinds = self._reader.columns.kinds, self._target.kinds
        types = [
            (kinds[0][before.kind].dtype, kinds[1][after.kind].dtype)
            for before, after in zip(read, written, strict=True)
        ]
        if types[0][0] is not types[0][1]:
            found = self._reader.read(read, workspace.for_inputs())
            if self._reader.columns.digests is not None:
                self._expect_digests(read, _digest(found))
            blocks, counts = cast_blocks(found, types, workspace.block.memory)
            if self._note is not None and counts != CastCounts():
                self._note(counts)
            return blocks, _digest(blocks)
        blocks = self._reader.read(read, workspace)
        digests = _digest(blocks)
        self._expect_digests(read, digests)
        return blocks, digests

    def _expect_digests(self, read: Sequence[Section], digests: SectionDigests) -> None:
        for section, of_section in zip(read, digests, strict=True):
            self._reader.expect_digests(section, of_section)

    def _compute(
        self, sections: Sequence[Section], workspace: Workspace
    ) -> tuple[list[BlockMemory], SectionDigests]:
        memory, end = workspace.block.memory, 0
        blocks, digests = [], []
        for section in sections:
            at, found, size = [], [], 0
            for row in section.rows.tolist():
                reader = self._computed(row)
                block, digest = reader.read_checked(section.block, workspace, end)
                at.append(end)
                found.append(digest)
                size = block.nbytes
                end += int(aligned_bytes(np.array(size)))
            blocks.append(BlockMemory(memory, np.array(at, dtype=np.int64), size))
            digests.append(found)
        return blocks, digests


def _digest(blocks: Sequence[BlockMemory]) -> SectionDigests:
    return [list(map(block_digest, of_section)) for of_section in blocks]
