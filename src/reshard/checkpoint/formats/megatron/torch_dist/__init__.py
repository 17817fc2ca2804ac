"""`torch_dist`, the format of Megatron-core's `dist_checkpointing`: read and written.

`reader` reads a distributed checkpoint of PyTorch with Megatron's `stacked_names`, states and
`flat_ranges`; `arrangement` lays out new ones. `format` is the face to the registry.
"""
