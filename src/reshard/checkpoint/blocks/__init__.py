"""Reading and writing tensors in blocks, in bounded memory.

`grid` divides a tensor into blocks; `spans` finds the byte ranges of blocks in shards; `block_io`
reads and writes blocks, singly or in batches, for tensors in `tensor_columns`. `shard_reads` reads
boxes of shards, and `fusing` binds fused parameters and their members to each other's bytes. Start
with `block_io`.
"""
