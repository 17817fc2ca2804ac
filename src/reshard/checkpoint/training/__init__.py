"""Training state in checkpoints: optimizer state, hyper-parameters and counters.

`state` finds which tensor is which parameter's what, by the names that programs give them.
"""
