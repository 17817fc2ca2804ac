"""The table of operators: all that is known of each in one row, in the module of its family.

`operator.py` says what a row has; `table.py` collects the rows and takes users' own. The families:
elementwise, products, reductions, movement and arrangement, indexing, ordering, windows,
linear algebra, creation, and those of `networks/`. `work.py` and `result_types.py` have what rows
name for cost and types; what ranks compute is in `reshard.spmd.local`. To add an
operator, write its row in its family.
"""
