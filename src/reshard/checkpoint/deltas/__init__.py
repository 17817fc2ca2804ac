"""Deltas: what changed between two checkpoints, as a file, and a checkpoint with a delta applied.

    encoding      the changed elements of one block as bytes
    compression   these, compressed
    beside        values and files beside tensors, in a delta
    delta_file    the file: header, payload, index (docs/deltas.md)
    making        the delta of two checkpoints
    patching      a checkpoint with deltas, its changed tensors computed block by block
    application   that, converted into a new checkpoint

Start at `delta_file`.
"""
