"""Propagation: inference of the shardings of a whole graph from those of a few values.

`graph.py` has the graph, and `strategies.py` is the entry point. `propagation.py` propagates by
rules (with `axis_parts`, `factor_shardings`, `merging`, `operator_stages`); the folder `by_cost`
minimizes time (with `operator_work`). The folder `placement` lists the resulting reshards (with
`common_axes`).
"""
