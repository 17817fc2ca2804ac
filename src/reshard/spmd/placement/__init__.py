"""Placement: the reshards of a graph whose values have shardings, and its pending sums.

`placement` lists the reshards. `pending_values` decides which sums are reduced later than where
they arise, by `largest_closure`.
"""
