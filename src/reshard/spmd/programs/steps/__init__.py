"""Steps of programs: a single step, and sequences of steps.

`step_order.py` has a step as data, and the positions where movements start and are waited for.
`compiled_work.py` compiles the steps between movements with `torch.compile`. `reused_memory.py`
finds steps that write into the memory of an operand.
"""
