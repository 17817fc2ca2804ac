"""PyTorch's distributed checkpoints (DCP): `.metadata`, and files of archives.

`reader` reads `metadata` (or `rank_metadata`) and binds tensors to `chunks`; those that were
compressed (`stream_transforms`) are `packed_archives`. `arrangement` lays out new ones. `format`
is the face to the registry. Start with `reader`.
"""
