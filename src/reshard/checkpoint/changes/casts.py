"""Tensors in another floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from reshard.checkpoint.changes.computed import ReadBox
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
