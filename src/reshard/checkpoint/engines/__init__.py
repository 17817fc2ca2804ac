"""The parameters of an engine's ranks, bound to the bytes of a checkpoint.

`rank_parameters` binds or loads a rank's parameters, `conversion` plans files of all ranks. Layouts
of engines are in `reshard.recipes.engine_layouts`.
"""
