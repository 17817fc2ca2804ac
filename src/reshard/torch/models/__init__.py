"""Models on the ranks of a job: their tensors, and the names that two models have in common.

    model_inputs         models as users give them, and the tensors of modules
    parameters           list the tensors of this rank, with their shardings
    parameter_columns    the same of very many tensors, as columns
    memory               where tensors are stored, and which share memory
    model_manifest       the tensors of all ranks, assembled to those of the full model
    manifest_documents   manifests as JSON
    naming               names, fused parameters, stacks and ties
    recipe_models        plain tensors with the layouts of a recipe
    megatron_models      Megatron's configs, process groups and parameter attributes
    model_pairs          the names of Megatron's models and of their counterparts

Start at `parameters`.
"""
