"""Tensors of one number, made of no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.changes.computed import ReadBox
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType
from reshard.elements import CastCounts
from reshard.layout import Box


@dataclass(frozen=True)
class ConstantTensor:
    """A tensor without dimensions: `number` as `dtype`, a type that NumPy has."""

    dtype: DType
    number: float

    @property
    def shape(self) -> tuple[int, ...]:
        """No dimensions."""
        return ()

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """None."""
        return ()

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Nothing is read."""
        return ()

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """The number."""
        out.reshape(-1)[:] = np.array([self.number], dtype=self.dtype.numpy).view(out.dtype)
        return CastCounts()
