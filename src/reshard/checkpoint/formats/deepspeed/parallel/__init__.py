"""Ranks that do not have the same parameters.

`experts`: ranks that share out a layer's experts; `pipelines`: stages that share out layers.
"""
