"""A value without tensors as `torch.save` writes it, without PyTorch."""

from __future__ import annotations

import io
import zipfile
from typing import Any

from reshard.checkpoint.formats.torch_files.pickle_writing import write_pickle

# The same bytes whenever they are written.
_TIME = (1980, 1, 1, 0, 0, 0)


def saved_bytes(value: Any) -> bytes:
    """The archive of a value that has no tensors in it: numbers, text, names of classes.

    >>> saved_bytes({"step": 3})[:4]
    b'PK\\x03\\x04'

    Raises UsageError for what a pickle of this package cannot say.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        records = {"data.pkl": write_pickle(value), "byteorder": b"little", "version": b"3\n"}
        for name, record in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", _TIME), record)
    return content.getvalue()
