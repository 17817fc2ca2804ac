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
from reshard.checkpoint.formats.torch_files.new_files import saved_bytes
from reshard.checkpoint.formats.write_plan import NewFile, WritePlan

VALUES_FILE = "__0_1.distcp"


def add_values(
    write_plan: WritePlan, values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]
) -> WritePlan:
    """Return a write plan with a file of plain values, if there are any.

    Raises:
        UsageError: a value that a pickle of plain values cannot say.
    """
    if not values:
        return write_plan
    content = b"".join(saved_bytes(value) for value in values.values())
    file = NewFile(StoredFile(VALUES_FILE, len(content), 0), content)
    return dataclasses.replace(
        write_plan,
        files=(*write_plan.files, file),
        values=dict(values),
        paths={**write_plan.paths, **{name: paths[name] for name in values if name in paths}},
    )


def with_value_items(write_plan: WritePlan) -> WritePlan:
    """Return a write plan whose items are also its values."""
    items, start = dict(write_plan.items), 0
    for name, value in write_plan.values.items():
        size = len(saved_bytes(value))
        items[name] = StoredItem(name, FileRange(VALUES_FILE, start), size)
        start += size
    return dataclasses.replace(write_plan, items=items)
