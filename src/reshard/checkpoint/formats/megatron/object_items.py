"""Objects of a distributed checkpoint, as the values that `torch.save` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import StoredItem
from reshard.checkpoint.formats.torch_files.saved_files import read_torch_value
from reshard.errors import FormatError


def read_object(folder: Path, item: StoredItem) -> Any:
    """The value of an object; its tensors lie behind the object's first byte.

    Raises:
        FormatError: an object that was transformed, ends early, or is no value.
    """
    path, start_bytes = folder / item.place.path, item.place.start_bytes
    label = f"{path} bytes {start_bytes}: object {item.name!r}"
    if item.transforms:
        raise FormatError(
            f"{label} was transformed ({', '.join(item.transforms)}), and is needed to tell whose "
            "the optimizer state is; save it without this extension"
        )
    with path.open("rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(start_bytes + offset)
            content = file.read(max(0, min(size, item.size_bytes - offset)))
            if len(content) != size:
                raise FormatError(f"{label} ends before byte {offset + size}; it was cut off")
            return content

        return read_torch_value(read, item.size_bytes, label)
