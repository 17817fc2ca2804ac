"""Model folders for `from_pretrained` of transformers, from a training checkpoint.

`conversion` plans a model folder, or compares it with a training checkpoint; `names` translates
weights to the architecture's names; `model_folder` has the other files, and tied weights.
"""
