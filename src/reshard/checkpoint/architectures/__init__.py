"""Architectures: which tensors the model class of a config.json loads.

`checking` compares the tensors of a target with those before anything is written; `records` are the
tensors of public classes, recorded from transformers.
"""
