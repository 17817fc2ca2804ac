"""Engines' layouts in conversions.

cuts     each rank of the target holds what an engine's rank reads
states   a model's own tensors, from what an engine's ranks hold of it
"""
