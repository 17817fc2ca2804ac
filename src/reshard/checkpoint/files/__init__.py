"""Bytes between files and memory, and folders that survive a crash; nothing here knows tensors.

`source_file` reads into `aligned_memory`, `target_file` writes from it, both by direct I/O where
that pays; `pipeline` does so in threads, `folders` makes names durable and locks, `host_memory` is
where processes of one host meet. Start with `source_file`.
"""
