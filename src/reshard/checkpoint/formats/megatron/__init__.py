"""Megatron's checkpoints: `torch_dist`, and the folders of its ranks.

    torch_dist/         what `dist_checkpointing` saves
    legacy/             a folder for each model-parallel rank
    fsdp_dtensor        what Megatron FSDP saves
    module_names, module_order, parameter_cuts
                        the parameters of a model, their order, and how they are cut
    optimizer_names     `optimizer.state.KEY.NAME`, as `torch_dist` has it
    common_state        arguments, groups, steps
    buckets, rank_parts flat buffers of optimizer state, and blocks of ranks put together
    iterations, object_items
                        the folder of a step, objects among tensors

Nothing of Megatron or PyTorch is imported.
"""
