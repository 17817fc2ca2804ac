"""Checkpoints as engines hold them: the parameters of each rank, bound to the bytes of the files.

`rank_parameters` binds or loads a rank's parameters, `conversion` plans files of all ranks. Layouts
of engines are in `reshard.recipes.engine_layouts`.
"""
