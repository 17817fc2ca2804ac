"""Formats of checkpoints on disk, each a module or a package with a `FORMAT`.

`format` is the protocol, and `write_plan` has the values of new checkpoints. `registry` is the
table of formats, and `opening` detects the format of a path. Several formats share `chunks`, parts
of tensors in the files of ranks, and `optimizer_states`, the names of optimizer state. To add a
format, write its module, and a row in `registry`. Start with `format`; `safetensors.huggingface` is
the smallest format.
"""
