"""Conversions: planned from a request, and run so that the target appears whole or not at all.

    plan            plan a `Conversion` for a request and a source: names, layouts, files
    conversion      a planned conversion: the bytes that it reads, writes and moves
    run             run a conversion inside a staging folder (`staging`, `journal`)
    work_items      the blocks that a run copies, casts or computes, in batches
    checksums       checksums inside the files of the source and of the target
    uploads         files sent to a store while blocks are written
    engine_states   layouts of inference engines, both ways

Options are in `reshard.checkpoint.options`. Start at `plan`.
"""
