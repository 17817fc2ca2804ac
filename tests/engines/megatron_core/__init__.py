"""Megatron-core, whose sharded state dicts say how its models are cut."""
