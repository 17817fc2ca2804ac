"""Layouts of engines, from their own code: what each rank holds, and where it comes from.

    tracing             `trace_loading`: the layout of a rank, from the loader that fills it
    following           a loader's operators, followed while it runs
    operators           what PyTorch's operators do to origins
    origins             what an element is: taken from a source, computed, constant
    region_map          a tensor's boxes with their origins, and what copies do to them
    element_map         boxes found in numbers, one for each element
    storage_map         what is in a memory: writes in order, read through any view
    strided_overlap     where two strided regions of one memory meet
    targets             parameters before and after loading, on any device
    index_values        the same by values that name their place
    pretended_ranks     this one process as a rank of many, whose collectives move nothing
    module_layouts      modules whose parameters say how they are cut: DTensors, Megatron's shards

Start at `tracing`.
"""
