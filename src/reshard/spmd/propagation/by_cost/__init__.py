"""Propagation by cost: the shardings of a graph that minimize its estimated time.

`cost_propagation` is the entry point. `candidates` has the shardings with which operators may run,
and `cost_problem` the graph as a sum of tables, which `factor_graph` minimizes. `cost_model`
estimates times of computation and movement, `movements` those of all candidates at once.
"""
