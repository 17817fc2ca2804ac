"""Automatic choice of the shardings of a function's arguments, for a mesh and a memory limit.

`auto` is the entry point for users. `input_search` finds shardings in graphs of any size,
`least_inputs` the optimal ones in small graphs, with a proof of optimality.
"""
