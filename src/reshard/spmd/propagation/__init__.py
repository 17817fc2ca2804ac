"""Propagation: inference of the shardings of a whole graph from those of a few values.

`strategies.py` is the entry point. `propagation.py` propagates by rules (with `axes` and
`merging`); the folder `by_cost` minimizes time. `reshards.py` lists the resulting reshards, and
`partial_sums.py` decides which sums are reduced later.
"""
