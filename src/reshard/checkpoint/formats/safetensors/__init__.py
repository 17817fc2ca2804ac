"""Checkpoints in safetensors files: whole tensors as Hugging Face has them, and a rank's shards.

`header` reads the header of a file, `header_writer` writes it. `huggingface` and `sharded` are the
two formats of checkpoints.
"""
