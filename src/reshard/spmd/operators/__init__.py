"""The table of operators: one row with all properties of each, in the module of its family.

`operator.py` defines a row. `table.py` collects the rows and registers custom ones. The families:
elementwise, products, reductions, movement and arrangement, indexing, ordering, windows, linear
algebra, creation, and those of `networks/`. `work.py` and `result_types.py` have the cost and type
functions that rows name; the local functions are in `reshard.spmd.local`. To add an operator, write
its row in its family.
"""
