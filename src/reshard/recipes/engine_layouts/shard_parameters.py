"""Parameters that are shards: those of engines that keep a tensor's own name and cut it.

DTensors and Megatron's sharded state dicts say of a parameter which part of a whole tensor it is.
As a `ParameterLayout` it has a piece for each box that its rank holds, copied from that tensor::

    layout "tp@blocks[4,4], -" of a tensor 8 x 3, rank 1 of 2        the parameter, 4 x 3

    0:2 | 2:4 || 4:6 | 6:8                                            [0:2] from row 2
          ^^^          ^^^                                            [2:4] from row 6
"""

from __future__ import annotations

import itertools

from reshard.binding import View
from reshard.dtypes import DType
from reshard.errors import LayoutError
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts.parameter_layout import ParameterLayout
from reshard.recipes.engine_layouts.pieces import SourcePiece
from reshard.runs import PAD


def shard_parameter(
    name: str, dtype: DType | str, layout: Layout, rank: int, source: str | None = None
) -> ParameterLayout | None:
    """A rank's shard of a tensor as a parameter; None where the rank holds none of it.

    Args:
        name: of the parameter.
        dtype: of its elements.
        layout: of the whole tensor, over ranks.
        rank: in the layout.
        source: the tensor's name, where it is not the parameter's.

    Raises:
        LayoutError: a rank that is not there, or that holds several boxes one behind the other
            (a flat buffer), which are no parameter of the tensor's rank.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding_text import spec
    >>> cut = spec(DeviceMesh.of(tp=2), "tp@blocks[4,4], -").layout((8, 3))
    >>> print(shard_parameter("gate_up", "float32", cut, 1))
    gate_up float32 [4, 3]
      [0:2, 0:3] gate_up from 6, strides 3, 1
      [2:4, 0:3] gate_up from 18, strides 3, 1
    """
    cells = layout.cells_of(rank)
    if not cells:
        return None
    if len(cells) > 1:
        raise LayoutError(
            f"rank {rank} holds {len(cells)} cells of {name!r}, one behind the other in its "
            "memory; a parameter is one cell. Give the layout of each part by itself"
        )
    parts = layout.cell_part[cells.start].tolist()
    strides = View.row_major(layout.shape).strides
    runs = [table.runs_of(part) for table, part in zip(layout.tables, parts, strict=True)]
    pieces, unfilled = [], []
    for product in itertools.product(*runs):
        local = [(at, at + stop - start) for start, stop, at, _ in product]
        box = Box(tuple(low for low, _ in local), tuple(high for _, high in local))
        if any(role == PAD for _, _, _, role in product):
            unfilled.append(box)
            continue
        offset = sum(run[0] * stride for run, stride in zip(product, strides, strict=True))
        pieces.append(SourcePiece(box, source or name, View(offset, strides)))
    shape = layout.cell_shape[cells.start].tolist()
    return ParameterLayout.of(name, shape, dtype, pieces, unfilled=unfilled)
