"""Models on the ranks of a job: their tensors, and the names that two models have in common.

    model_inputs         models as users give them, also by a recipe, and the tensors of modules
    parameters           list the tensors of this rank, with their shardings
    local_tensors        the same as columns, and where they are in memory
    model_manifest       the tensors of all ranks as messages, assembled to those of the full model
    naming               names, fused parameters, stacks and ties
    megatron_models      Megatron's configs, process groups and parameter attributes
    model_pairs          the names of Megatron's models and of their counterparts

Start at `parameters`.
"""
