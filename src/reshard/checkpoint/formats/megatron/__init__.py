"""Megatron's checkpoints: `torch_dist`, the folders of its ranks, and FSDP's DTensors.

    torch_dist          the format of `dist_checkpointing`: tensors over a distributed checkpoint,
                        `torch_dist_reader` reads it
    stacked_names       layers and experts in one tensor, and one by one
    optimizer_names     `optimizer.state.KEY.NAME` and the names that all formats have
    common_state        `common.pt`: arguments, groups, steps

Start at `torch_dist`. Nothing of Megatron or PyTorch is imported.
"""
