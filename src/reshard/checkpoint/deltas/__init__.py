"""Deltas: files with the changes between two checkpoints, and checkpoints with deltas applied.

    encoding      the changed elements of a block as bytes
    delta_file    the file: header, payload, index (docs/deltas.md)
    create        the delta of two checkpoints
    apply         a new checkpoint from a base and deltas

Start with `delta_file`.
"""
