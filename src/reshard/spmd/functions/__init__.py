"""The functions of `reshard.spmd` on arrays: those of the array API, and of networks.

Each reads its arguments and carries out operations. `elementwise.py` makes those whose rows in the
table of operators need no more; `array_arguments.py` checks arguments for all of them.
"""
