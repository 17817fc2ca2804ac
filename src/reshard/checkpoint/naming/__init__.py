"""Selecting and renaming the tensors of a checkpoint. No byte is copied.

`renaming` translates between the conventions of programs, `selection` takes some of the tensors and
renames them by patterns.
"""
