"""Local functions: what each rank computes on its own parts, by a library.

`library.py` has NumPy and PyTorch under one set of names; `local_work.py` says what is computed and
on which parts. The other modules hold the local functions, by the family of their operators: each
takes a `LocalWork` and returns what the ranks here run. Rows of `reshard.spmd.operators` name
them; start at `by_name.py`, which does for most.
"""
