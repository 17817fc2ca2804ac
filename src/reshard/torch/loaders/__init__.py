"""Layouts of engines, traced from their own code: the contents of each rank and their sources.

    tracing             `trace_loading`: trace the layout of a rank from its weight loader
    tracing_mode        a dispatch mode: what PyTorch's operators do to the origins of elements
    region_map          boxes of a tensor or a storage with the origins of their elements
    strided_overlap     the intersection of two strided regions of one storage
    element_map         boxes in arrays with a number for each element
    index_values        trace by element values that encode their position
    targets             parameters before and after loading, on any device
    fake_ranks          run this process as any rank, with collectives that move nothing
    module_layouts      layouts of modules that describe their own sharding: DTensors, Megatron

Start at `tracing`.
"""
