"""Overlap of communication and computation: its cost, and matrix products split to permit it.

`overlapped_trace.py` estimates the memory and the time of a program with movements in flight.
`decomposed_products.py` splits matrix products and their movements into pieces.
"""
