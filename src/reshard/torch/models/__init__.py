"""Models on the ranks of a job: their tensors, by names that two models have in common.

`parameters` is where to start: the tensors of one rank, and how each is cut. `rosters` puts
together what all ranks have; `naming` maps names; `recipe_models` and `megatron_groups` are for
models that do not say themselves how they are cut; `model_pairs` finds the names that Megatron's
have on the Hub.
"""
