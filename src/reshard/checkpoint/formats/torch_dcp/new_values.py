"""Plain values of a new distributed checkpoint: each in an archive, as PyTorch writes it.

PyTorch has what is no tensor as bytes that `torch.save` made, one archive for each. Values of the
source are written so, in a file of their own behind those of the first rank, and are read as items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.binding import FileRange
from reshard.checkpoint.contents import StoredFile, StoredItem
from reshard.checkpoint.formats.arrangement import Arrangement, NewFile
from reshard.checkpoint.formats.torch_files.new_files import saved_bytes

VALUES_FILE = "__0_1.distcp"


def add_values(
    arrangement: Arrangement, values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]
) -> Arrangement:
    """An arrangement with a file of plain values, if there are any.

    Raises:
        UsageError: a value that a pickle of plain values cannot say.
    """
    if not values:
        return arrangement
    content = b"".join(saved_bytes(value) for value in values.values())
    file = NewFile(StoredFile(VALUES_FILE, len(content), 0), content)
    return dataclasses.replace(
        arrangement,
        files=(*arrangement.files, file),
        values=dict(values),
        paths={**arrangement.paths, **{name: paths[name] for name in values if name in paths}},
    )


def with_value_items(arrangement: Arrangement) -> Arrangement:
    """An arrangement whose items are also its values."""
    items, start = dict(arrangement.items), 0
    for name, value in arrangement.values.items():
        size = len(saved_bytes(value))
        items[name] = StoredItem(name, FileRange(VALUES_FILE, start), size)
        start += size
    return dataclasses.replace(arrangement, items=items)
