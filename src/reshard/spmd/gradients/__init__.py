"""Gradients of functions of sharded arrays.

`transforms.py` is the entry point: `grad`, `value_and_grad`, `vjp`. `tape.py` records a function's
operations, by the hook that traces use, and runs the backward pass; an operator's record has its
derivative. `rematerialization.py` recomputes values instead of storing them, and
`optimizers.py` updates parameters.
"""
