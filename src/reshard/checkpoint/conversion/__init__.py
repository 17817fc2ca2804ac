"""Conversions: planned from a request, and run so that the target appears whole or not at all.

    plan            from a request and a source to a `Conversion`: names, layouts, files
    conversion      a planned conversion: what it reads, writes and moves
    run             one run, inside a staging folder (`staging`, `journal`)
    work_items      the blocks that a run copies, casts or computes, in batches
    checksums       checksums that files have of their own, of the source and of the target
    uploads         files sent to a store while blocks are written
    engine_states   layouts of inference engines, both ways

Options are in `reshard.checkpoint.options`. Start at `plan`.
"""
