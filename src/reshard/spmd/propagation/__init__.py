"""Propagation: the shardings of a whole graph from those of a few values.

`graph.py` is the graph, `strategies.py` the front: `propagation.py` propagates by rules (with
`axis_parts`, `factor_shardings`, `merging`, `operator_stages`), `cost_propagation.py` by least
time (with `cost_problem`, `cost_candidates`, `cost_model`, `movement_tables`, `operator_work`,
`least_sum`). The folder `placement` says what moves then (with `common_axes`).
"""
