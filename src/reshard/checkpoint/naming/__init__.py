"""Names of tensors: some of a checkpoint's tensors, by other names.

`renaming` turns a checkpoint in one program's names into one in another's, `selection` takes some
of the tensors and renames them by patterns. No byte is copied.
"""
