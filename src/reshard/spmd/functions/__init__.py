"""The functions of `reshard.spmd` on arrays: those of the array API, and of neural networks.

Each function reads its arguments and executes operations. `elementwise.py` creates the functions
that are defined by their rows in the table of operators. `array_arguments.py` checks arguments for
all of them.
"""
