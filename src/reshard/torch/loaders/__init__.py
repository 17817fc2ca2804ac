"""Layouts of engines, from their own code: what each rank holds, and where it comes from.

`pretended_ranks` makes this one process a rank of many, whose collectives move nothing;
`module_layouts` reads modules whose parameters say how they are cut: DTensors, Megatron's shards.
"""
