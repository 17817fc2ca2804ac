"""Checkpoints as engines hold them: the parameters of each rank, bound to the bytes of the files.

    rank_parameters   a rank's parameters as tensors, each bound to places in the checkpoint's files
    made_elements     what no file has: elements that are computed, cast or constant
    conversion        a conversion that writes what every rank holds
    loading           a rank's parameters in memory

Layouts of engines are in `reshard.recipes.engine_layouts`.
"""
