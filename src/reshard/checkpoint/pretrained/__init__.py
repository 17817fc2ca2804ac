"""Model folders of a training checkpoint: what `from_pretrained` of transformers loads.

`conversion` plans one; `weights` are what a model has of a training state, `model_names` what the
architecture calls them, `ties` which of them are stored once, `model_folder` the files beside them.
`comparison` compares a training checkpoint with a model folder that is there.
"""
