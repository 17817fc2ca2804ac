"""Shapes of weights that are stored flat, from the values that bitsandbytes stores with them.

A 4-bit weight of bitsandbytes is one dimension of packed elements; its shape stands in a tensor of
bytes, `X.weight.quant_state.bitsandbytes__nf4`, as JSON. It is the only value that sharding needs.
"""

from __future__ import annotations

import json

from reshard.checkpoint.blocks.block_io import BlockReader, Workspace, open_sources
from reshard.checkpoint.contents import Checkpoint
from reshard.errors import FormatError

_MARK = ".quant_state.bitsandbytes__"
# Of JSON with a shape, a type and some numbers; what is longer is none.
_MAX_BYTES = 1 << 16


def read_flat_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the flat weights of a checkpoint, by name.

    Raises:
        FormatError: bytes that are no JSON with a shape.
        RunError: a file that cannot be read.
    """
    found: dict[str, tuple[int, ...]] = {}
    states = [checkpoint[name] for name in checkpoint.tensors if _MARK in name]
    files = open_sources(checkpoint)
    try:
        for tensor in states:
            reader = BlockReader(tensor, files)
            content = b""
            if reader.grid.count == 1 and reader.grid.largest_bytes <= _MAX_BYTES:
                workspace = Workspace(reader.grid.largest_bytes, reader.span_bytes)
                content = bytes(reader.read(0, workspace))
                workspace.close()
            try:
                shape = tuple(int(size) for size in json.loads(content)["shape"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise FormatError(
                    f"{tensor.name!r} in {checkpoint.folder} is no JSON with a shape, by which a "
                    f"flat weight of bitsandbytes is cut; its writer should have put one: {error}"
                ) from error
            found[tensor.name.partition(_MARK)[0]] = shape
    finally:
        files.close()
    return found
