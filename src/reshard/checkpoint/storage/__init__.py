"""Local files, object stores and uploads. These modules do not depend on tensors.

::

    local_files          direct I/O from and into page-aligned memory
    filesystem           durable names, locks, files that no link redirects
    permissions          modes of new files; links that may be followed
    derived_files        content created when it is first read
    byte_ranges          coalescing of ranges
    byte_streams         decompression in bounded memory
    range_checksums      CRC-32 of ranges, from pieces in any order
    threads              tasks in threads, progress, stopping

    object_stores        the protocols of stores; reading by obstore
    hub                  models of the Hugging Face Hub
    remote_paths         URLs with the reading methods of `pathlib.Path`
    remote_files         objects read by ranges, by many threads
    shared_read_cache    objects read once for all processes of a host
    s3, azure, gcs       writing to each store in parts
    upload_marker        the objects that mark an unfinished upload
    uploads              a checkpoint's files on their way to a store
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.checkpoint.storage.filesystem import translate_os_errors
    from reshard.checkpoint.storage.remote_paths import RemotePath, as_path

__all__ = ["RemotePath", "as_path", "translate_os_errors"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.checkpoint.storage.filesystem": ["translate_os_errors"],
        "reshard.checkpoint.storage.remote_paths": ["as_path", "RemotePath"],
    },
)
