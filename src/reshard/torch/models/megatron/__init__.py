"""Megatron's models as they are given: what their modules say of themselves.

`megatron_configs` reads what the whole model has, `megatron_groups` where this rank is among the
others, and `megatron_parameters` what the attributes of parameters say of how these are cut.
"""
