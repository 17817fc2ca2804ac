"""Propagation by cost: the shardings of a graph that minimize its estimated time.

`cost_propagation` is the entry point. `cost_candidates` has the shardings with which operators may
run, and `cost_problem` the graph as a sum of tables (`cost_table`), which `least_sum` minimizes.
`cost_model` estimates times of computation and movement: `movement_tables` of movements of values,
`edge_moves` of halo exchanges, `common_reads` of values that several operations read after one
movement.
"""
