"""Gradients of functions of arrays in shards.

`transforms.py` is the front: `grad`, `value_and_grad`, `vjp`. `tape.py` sees a function's
operations, by the hook that traces use, and goes through them backwards. `table.py` has the
derivative of every operator, or why it has none; the families of operators are those of
`reshard.spmd.operators`. `rematerialization.py` computes values again instead of keeping them,
`optimizers.py` changes parameters by their gradients.
"""
