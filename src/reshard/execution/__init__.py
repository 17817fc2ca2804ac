"""Arrays in this process: one engine that copies, combines and fills.

It takes columns of copies between the cells of two layouts, and knows nothing of where they come
from; `plans.run` makes them for plans, jobs and jobs in stages, `collectives` for programs.

    engine           start here: what is done for each tensor, and in which order
    copy_columns     the columns, and the NumPy copies that they stand for
    windows          many pieces at equal distances as one strided view
    copies           one copy; its pieces, their order in memory, and the threads that share them
    arrays           NumPy arrays and torch tensors as memory with arithmetic
    inputs, outputs  what is given and what is written: checked before anything is copied
    contributions    partial sums: what completes them
    cells            where the cells of a layout lie in the arrays of its slots
    fresh_memory     the memory of large new arrays
"""
