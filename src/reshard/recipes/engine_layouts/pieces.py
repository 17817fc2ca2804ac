"""Regions of a parameter, by what fills them.

A loader fills a parameter box by box: with elements of a source as they are (`SourcePiece`), with
what it computes of some (`Computed`), with one value (`Constant`). What is left is not filled::

    parameter 4 x 3            source "up" 6 x 3, row major

    +---------+                rows 2:5 of it: offset 6, strides (3, 1)
    | up      |  SourcePiece
    |         |
    |         |
    +---------+
    | 0       |  Constant
    +---------+

A region of a source is a `View`: an element offset and a stride for each dimension of the box,
over the source's elements in row-major order. So a transposed region has its strides exchanged, an
interleaved one has them doubled, and one that is repeated has a stride of 0.
"""

from __future__ import annotations

from typing import NamedTuple

from reshard.binding import View
from reshard.layout import Box


class SourcePiece(NamedTuple):
    """A box of a parameter that holds elements of a source.

    `steps` says what happens to the type of each element on the way: nothing where it is empty,
    `"to float32"` for a cast, `"bits as float8_e4m3fn"` where the same bits count as another type.

    >>> SourcePiece(Box((0, 0), (3, 3)), "up", View(6, (3, 1)))
    SourcePiece(box=Box(start=(0, 0), stop=(3, 3)), source='up',
    view=View(offset=6, strides=(3, 1)), steps=())
    """

    box: Box
    source: str
    view: View
    steps: tuple[str, ...] = ()


class Computed(NamedTuple):
    """A box of a parameter whose elements are computed from sources, and by which operations.

    `view` is the region of the only source where each element is computed of the one there, as by
    `exp` and `neg`; None where it is not known which element of a source an element depends on.
    """

    box: Box
    operations: tuple[str, ...]
    sources: tuple[str, ...]
    view: View | None = None


class Constant(NamedTuple):
    """A box of a parameter that the loader fills with one value, such as padding."""

    box: Box
    value: float
