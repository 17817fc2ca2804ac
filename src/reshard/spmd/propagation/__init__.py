"""Propagation: the shardings of a whole graph from those of a few values.

`graph.py` is the graph, `strategies.py` the front: `propagation.py` propagates by rules (with
`axis_parts`, `factor_shardings`, `merging`, `operator_stages`), the folder `by_cost` by least time
(with `operator_work`). The folder `placement` says what moves then (with `common_axes`).
"""
