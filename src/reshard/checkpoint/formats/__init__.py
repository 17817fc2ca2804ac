"""Formats of checkpoints on disk, each a module or folder behind one protocol.

`format` is the protocol, `registry` the table of formats, `opening` finds the one of a path, and
`write_plan` has the values of new checkpoints. To add a format, write its module, and a row in
`registry`. Start with `format`; `safetensors.huggingface` is the smallest.
"""
