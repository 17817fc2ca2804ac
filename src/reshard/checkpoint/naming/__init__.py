"""Names of tensors: a part of a checkpoint, or all of it, by other names. No byte is copied.

`renaming` translates between the conventions of programs, `selection` takes some of the tensors and
renames them by patterns.
"""
