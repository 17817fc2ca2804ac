"""Propagation by cost: of all shardings of a graph those with which it takes the least time.

`cost_propagation` is where to start. `cost_candidates` has the ways in which operators may run,
`cost_problem` the graph as a sum of tables (`cost_table`), whose least `least_sum` finds.
`cost_model` prices what is computed and moved: `movement_tables` movements of values, `edge_moves`
edges of other parts, `common_reads` what several operations read and moves once.
"""
