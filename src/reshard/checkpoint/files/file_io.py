"""Moving bytes between files and memory: the names that the rest of the package uses.

`AlignedBuffer` hands out memory in which a block lies as it lies in its file; `SourceFile` fills
it and `TargetFile` writes it, each by direct I/O where that pays and works, and by the page
cache otherwise; both are shared by threads. `sync_folder` makes the names of new files durable.
"""

from __future__ import annotations

from reshard.checkpoint.files.aligned_memory import PAGE_BYTES, AlignedBuffer, Region
from reshard.checkpoint.files.direct_io import DIRECT_MINIMUM_BYTES
from reshard.checkpoint.files.durability import sync_folder
from reshard.checkpoint.files.source_file import FileIdentity, SourceFile
from reshard.checkpoint.files.target_file import TargetFile, free_bytes

__all__ = [
    "DIRECT_MINIMUM_BYTES",
    "PAGE_BYTES",
    "AlignedBuffer",
    "FileIdentity",
    "Region",
    "SourceFile",
    "TargetFile",
    "free_bytes",
    "sync_folder",
]
