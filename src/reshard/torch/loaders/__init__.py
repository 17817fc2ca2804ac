"""Layouts of engines, traced from their own code: the contents of each rank and their sources.

    tracing             `trace_loading`: trace the layout of a rank from its weight loader, without
                        values of elements or with values that encode their position
    tracing_mode        a dispatch mode: what PyTorch's operators do to the origins of elements
    region_map          boxes of a tensor or a storage with the origins of their elements
    fake_ranks          run this process as any rank, with collectives that move nothing
    module_layouts      layouts of modules that describe their own sharding: DTensors, Megatron

Start at `tracing`.
"""
