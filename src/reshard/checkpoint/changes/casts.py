"""Tensors in another floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.changes.computed import ComputedTensor, ReadBox
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType
from reshard.elements.casting import CastCounts, cast_elements
from reshard.layout import Box


@dataclass(frozen=True)
class CastTensor:
    """A stored tensor's elements as `dtype`."""

    source: StoredTensor
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The source's."""
        return self.source.shape

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The one."""
        return (self.source,)

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """The same box of the source."""
        return (box.elements * self.source.dtype.itemsize_bytes,)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """The box's elements, rounded."""
        elements = read(0, box).reshape(-1)
        return cast_elements(elements, self.source.dtype, out.reshape(-1), self.dtype)


@dataclass(frozen=True)
class CastComputed:
    """A computed tensor's elements as `dtype`: what it is computed in is rounded first."""

    made: ComputedTensor
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the computed tensor."""
        return self.made.shape

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """What it is computed from."""
        return self.made.sources

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """As of the computed tensor."""
        return self.made.input_bytes(box)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """The box's elements, computed and then rounded."""
        elements = np.empty(box.shape, self.made.dtype.storage)
        counts = self.made.fill(box, elements, read)
        flat = elements.reshape(-1)
        return counts + cast_elements(flat, self.made.dtype, out.reshape(-1), self.dtype)
