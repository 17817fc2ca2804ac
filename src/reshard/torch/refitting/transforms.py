"""Transforms: changes to a tensor's elements between source and target.

A transform creates a target with other elements than its source::

    source  --prepare_send-->  sent, sharded like the source
                                  |
    target  <--finish_receive--  received, sharded like the target

A transform has access to whole local tensors: this rank's part of the source, and of the received
tensor. If every rank of the source can compute the output of its own part, and the output has fewer
bytes, the output is sent instead::

    source  --finish_receive-->  sent, sharded by `at_source`  -->  target

`Cast` and `BlockQuantized` are transforms; users' transforms are classes with these methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from reshard.dtypes import dtype as as_dtype
from reshard.elements import scale_blocks
from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.runs import PAD, RunTable

Shape = tuple[int, ...]


class Transform:
    """The base class of transforms: it sends the source's elements, and copies them on arrival.

    Ranks compare their transforms by `repr`, which is the class name by default; a transform with
    fields should be a dataclass.
    """

    def __repr__(self) -> str:
        return type(self).__name__

    def outputs(self, name: str) -> tuple[str, ...]:
        """Return the names of the targets created for the tensor `name`, which comes first."""
        return (name,)

    def sent_dtype(self, dtype: str) -> str:
        """Return the type of the sent elements for a source of type `dtype`."""
        return dtype

    def at_source(
        self, name: str, source: Layout, targets: Mapping[str, tuple[str, Layout]]
    ) -> Mapping[str, Layout] | str:
        """Return the layouts of targets that each rank creates from its own part of the source.

        Args:
            name: of the tensor.
            source: its layout.
            targets: element types and layouts of the existing targets, by `outputs`.

        Returns:
            A layout for each of `outputs`, of the target's shape; or why it is not possible.
        """
        return f"{self!r} is applied to what has arrived"

    def stretch(
        self, name: str, output: str, shape: Shape, dimension: int, start: int, stop: int
    ) -> tuple[int, int] | None:
        """Return the indices of an output's dimension made from `start:stop` of the tensor's.

        None if they also depend on other indices. Used for tensors whose source is fused.

        Args:
            name: of the tensor.
            output: an element of its `outputs`.
            shape: of the tensor.
            dimension: the same of both.
            start, stop: of the tensor.
        """
        return start, stop

    def check(
        self, name: str, layout: Layout, rank: int, target: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise ShardError if `finish_receive` could not create this rank's targets.

        Args:
            name: of the tensor.
            layout: of the received tensor, over global ranks.
            rank: this rank.
            target: this rank's targets by `outputs`, as far as it has them.
        """

    def prepare_send(self, name: str, source: torch.Tensor, sent: torch.Tensor) -> None:
        """Write the sent elements into `sent`, of the source's shape and of type `sent_dtype`."""
        sent.copy_(source)

    def finish_receive(
        self, name: str, received: torch.Tensor, target: Mapping[str, torch.Tensor]
    ) -> None:
        """Write this rank's targets, by `outputs`, from the received elements.

        If `at_source` returns layouts, it instead writes this rank's part of the output from its
        part of the source, before sending.
        """
        target[name].copy_(received)


@dataclass(frozen=True)
class Cast(Transform):
    """Send elements as `dtype`, and convert them to the target's type on arrival.

    `refit(cast=...)` does the same in less memory; this is an example.
    """

    dtype: str

    def sent_dtype(self, dtype: str) -> str:
        """Return `dtype`, whatever the source's type."""
        return as_dtype(self.dtype).name


@dataclass(frozen=True)
class BlockQuantized(Transform):
    """Quantization to float8, with a scale for each block of `block` elements.

    The scale of a block is its maximum absolute value divided by the maximum of the target's type.
    A target element is the source's divided by the scale, so that `element * scale` restores it.
    Blocks are counted from the beginning of the full tensor. If every rank's part of the source
    consists of complete blocks, the source ranks quantize and send float8; otherwise every rank's
    part of the target must consist of complete blocks. Source: the block-wise quantization of
    DeepSeek-V3's weights, 128 by 128 with float32 scales `weight_scale_inv`.

    Args:
        block: rows and columns of a block, in the last two dimensions.
        suffix: appended to the name of the tensor for the name of its scales.
    """

    block: tuple[int, int] = (128, 128)
    suffix: str = "_scale_inv"

    def makes(self, dtype: str) -> bool:
        """Return whether targets of a type are supported.

        >>> BlockQuantized().makes("float8_e4m3fn"), BlockQuantized().makes("bfloat16")
        (True, False)
        """
        return _is_float8(dtype)

    def outputs(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensor and its scales."""
        return name, name + self.suffix

    def at_source(
        self, name: str, source: Layout, targets: Mapping[str, tuple[str, Layout]]
    ) -> Mapping[str, Layout] | str:
        """Return the source's layout in elements and in blocks, if no block spans ranks."""
        if any(output not in targets for output in self.outputs(name)):
            return "the target has no scales"
        (dtype, _), (scales, in_scales) = (targets[output] for output in self.outputs(name))
        if not (_is_float8(dtype) and as_dtype(scales).name.startswith("float")):
            return f"the target is {dtype} with scales of {scales}"
        blocks = in_blocks(source, self.block)
        if not isinstance(blocks, Layout):
            return blocks
        if blocks.shape != in_scales.shape:
            return f"scales of shape {list(in_scales.shape)}, not {list(blocks.shape)}"
        return dict(zip(self.outputs(name), (source, blocks), strict=True))

    def stretch(
        self, name: str, output: str, shape: Shape, dimension: int, start: int, stop: int
    ) -> tuple[int, int] | None:
        """Return whole blocks, for the scales.

        >>> quantised, shape = BlockQuantized(), (300, 256)
        >>> quantised.stretch("w", "w_scale_inv", shape, 0, 128, 300)
        (1, 3)
        >>> quantised.stretch("w", "w_scale_inv", shape, 0, 64, 128)
        """
        if output == name:
            return start, stop
        # Blocks span the last two dimensions; in earlier dimensions each index is separate.
        size = (*[1] * (len(shape) - 2), *self.block)[dimension]
        if start % size or (stop % size and stop != shape[dimension]):
            return None
        return start // size, -(-stop // size)

    def check(
        self, name: str, layout: Layout, rank: int, target: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise ShardError for blocks that span ranks, and for scales of another shape."""
        missing = [output for output in self.outputs(name) if output not in target]
        if missing:
            raise ShardError(f"{name}: quantised, but this rank has no {missing[0]!r}")
        values, scales = (target[output] for output in self.outputs(name))
        if values.ndim < 2 or not _is_float8(as_dtype(values.dtype).name):
            raise ShardError(
                f"{name}: {values.dtype} of shape {list(values.shape)} cannot be quantised in "
                "blocks; the target is a float8 tensor of two dimensions or more"
            )
        for box in layout.boxes(rank):
            for d, size in zip((-2, -1), self.block, strict=True):
                if box.start[d] % size or (box.stop[d] % size and box.stop[d] != layout.shape[d]):
                    raise ShardError(
                        f"{name}: this rank has {box.start[d]}:{box.stop[d]} of dimension "
                        f"{layout.ndim + d}, which cuts a block of {size}; cut targets at blocks"
                    )
        cells = layout.cells_of(rank)
        if len(cells) != 1:
            raise ShardError(
                f"{name}: this rank has it in {len(cells)} pieces, whose blocks do not lie in rows "
                "and columns; give it one box, or stretches of each dimension"
            )
        # Check each run of a dimension, such as those of a fused tensor.
        for d, size in zip((-2, -1), self.block, strict=True):
            runs = layout.tables[d].single_runs()
            own = runs.take(runs.part == layout.cell_part[cells[0], d])
            inside = own.local_start % size != 0
            if inside.any():
                raise ShardError(
                    f"{name}: on this rank {int(own.start[inside][0])} of dimension "
                    f"{layout.ndim + d} lies at {int(own.local_start[inside][0])}, inside a block "
                    f"of {size}; give fused parts whole blocks"
                )
        expected = self._scales_shape(tuple(values.shape))
        if tuple(scales.shape) != expected or not scales.is_floating_point():
            raise ShardError(
                f"{name}: scales {scales.dtype} {list(scales.shape)} for elements of shape "
                f"{list(values.shape)}; expected floating point {list(expected)}"
            )

    def _scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], self.block, strict=True)))

    def finish_receive(
        self, name: str, received: torch.Tensor, target: Mapping[str, torch.Tensor]
    ) -> None:
        """Quantize the received elements, a row of blocks at a time."""
        values, scales = (target[output] for output in self.outputs(name))
        greatest = torch.finfo(values.dtype).max
        rows, columns = self.block
        for begin in range(0, received.shape[-2], rows):
            # Process a row of blocks at a time, so that only that much is in float32 at once.
            part = received[..., begin : begin + rows, :].to(torch.float32, copy=True)
            block_scales = scale_blocks(
                part, columns, greatest, lambda block: block.amax(dim=(-2, -1))
            )
            for column, scale in enumerate(block_scales):
                scales[..., begin // rows, column] = scale
            values[..., begin : begin + rows, :] = part.to(values.dtype)


#: The transforms of `quantize=`, by the format names of `reshard convert`.
QUANTIZATIONS: Mapping[str, BlockQuantized] = {"fp8-block128": BlockQuantized()}


def _is_float8(dtype: str) -> bool:
    return dtype.startswith("float8")


def in_blocks(layout: Layout, block: tuple[int, int]) -> Layout | str:
    """Return the layout of a tensor with an element for each block of the last two dimensions.

    Return the reason as text if a slot does not have whole blocks, in a single box.

    >>> from reshard.layout import Box
    >>> def rows(*cuts):
    ...     boxes = enumerate(zip(cuts, cuts[1:]))
    ...     return Layout.from_boxes((5, 4), [(i, Box((a, 0), (b, 4))) for i, (a, b) in boxes])
    >>> in_blocks(rows(0, 2, 5), (2, 4)).boxes(1)
    (Box(start=(1, 0), stop=(3, 1)),)
    >>> in_blocks(rows(0, 3, 5), (2, 4))
    'dimension 0 is cut inside a block of 2, at 0:3'
    """
    if layout.contributions > 1:
        return "the source is partial"
    if layout.ndim < 2 or any(len(layout.cells_of(slot)) > 1 for slot in layout.holders):
        return "the source has less than two dimensions, or a rank several boxes of it"
    tables = list(layout.tables)
    for dimension, size in zip((-2, -1), block, strict=True):
        table = tables[dimension]
        runs, length = table.single_runs(), table.dimension_length
        cuts = table.splits_groups(size) | (runs.role == PAD)
        if cuts.any():
            first = runs.take(cuts)
            return (
                f"dimension {dimension + layout.ndim} is cut inside a block of {size}, at "
                f"{first.start[0]}:{first.stop[0]}"
            )
        tables[dimension] = RunTable.from_columns(
            -(-length // size),
            table.parts,
            runs.part,
            runs.start // size,
            -(-runs.length // size),
            runs.local_start // size,
            runs.role,
        )
    return Layout(
        tuple(table.dimension_length for table in tables),
        tables,
        layout.slots,
        layout.cell_slot,
        layout.cell_part,
        layout.cell_contribution,
    )
