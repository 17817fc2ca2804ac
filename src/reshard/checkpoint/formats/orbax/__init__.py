"""Orbax checkpoints: a tree of JAX arrays in Zarr chunks, in files or in an OCDBT database.

format            the format `orbax`
folders           which folder has the tree: steps and items of a CheckpointManager
tree_metadata     `_METADATA`: the tree, its keys and its kinds of leaves
aggregate         `checkpoint`: the tree of older versions, in one file
key_values        where the value of a key lies: a file, or a range of one
ocdbt             nodes of OCDBT, both ways; `crc32c` their checksum
zarr_metadata     types, grids and codecs of arrays (Zarr 2 and 3)
chunks            chunks as shards; those that are compressed are unpacked when they are read
shardings         `_sharding`: JAX's shardings as ours
reader            all of that as a checkpoint
arrangement       new checkpoints
"""
