"""Local functions: the computation of each rank on its own shards, with an array library.

`library.py` gives NumPy and PyTorch one set of names. `local_work.py` describes what is computed,
and on which shards. The other modules have the local functions, by operator family: each takes a
`LocalWork` and returns the function that the ranks of this process run. Rows of
`reshard.spmd.operators` name them; `by_name.py` has the most common one.
"""
