"""Carriers between ranks of a host: shared memory, and direct reads of a peer's memory.

`shared_memory` is where to start. `fd_passing` connects the ranks, `device_memory` is memory of
CUDA devices, and `direct_reads` copy from a peer's tensors.
"""
