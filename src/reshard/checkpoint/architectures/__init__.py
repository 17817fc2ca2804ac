"""Architectures: which tensors the model class of a config.json loads.

`checking` compares a target's tensors with the model class before anything is written; `records`
contains the tensors of public classes, recorded from transformers.
"""
