"""Coupled cuts: what an operator needs cut together.

    coupling        the members of one, as a recipe declares them

Start at `coupling`.
"""
