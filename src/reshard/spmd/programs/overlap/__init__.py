"""Movements beside computing: what that takes, and products in pieces so that there is more of it.

`overlapped_trace.py` counts the memory and the time of a program with movements under way;
`decomposed_products.py` cuts products of matrices and what moves for them.
"""
