"""Blocks of tensors, read from the shards that hold them and written to those that take them.

`grid` cuts a tensor into blocks; `tiles` and `strided_spans` find their bytes in shards; `block_io`
reads and writes them, `batches` many small ones at once, with `tensor_columns`. `shard_reads` reads
boxes of any size for loading. `fusing` binds a fused parameter to its members' bytes, and members
to those of a fused one. Start with `grid`.
"""
