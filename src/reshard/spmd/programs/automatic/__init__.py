"""Shardings of a function's arguments, chosen for a mesh and a limit of memory.

`auto` is what users call; `input_search` finds shardings in graphs of any size, `least_inputs` the
best ones in small graphs, with the proof that they are.
"""
