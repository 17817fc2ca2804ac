"""Names of tensors: a checkpoint in the names of another program, with parameters fused or apart.

`renaming` turns a checkpoint in one program's names into one in another's; `fusing` binds a fused
parameter to its members' bytes, and members to those of a fused one. No byte is copied.
"""
