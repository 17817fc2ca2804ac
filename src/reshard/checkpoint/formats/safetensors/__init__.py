"""Checkpoints in safetensors files: whole tensors as Hugging Face has them, and a rank's shards.

`header` reads and writes the header of one file, whose values are in `values`. `huggingface` and
`sharded` are the two formats of checkpoints. Start with `huggingface`.
"""
