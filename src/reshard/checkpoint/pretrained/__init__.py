"""Model folders for `from_pretrained` of transformers, from a training checkpoint.

`conversion` plans a model folder, or compares one with a training checkpoint; `names` are weights
in the architecture's names; `model_folder` are the other files, and tied weights.
"""
