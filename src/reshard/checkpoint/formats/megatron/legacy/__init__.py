"""The folders of Megatron-LM's ranks, `mp_rank_XX_YYY`: read and written.

`reader` puts together what `rank_folders` have: the parameters of `rank_models` and the state of
`rank_optimizers`. `arrangement` lays out new ones by `stage_layouts`. `format` is the face to the
registry.
"""
