"""Steps of programs: what one does, and several of them in their order.

`step_order.py` has a step as data, and where movements begin and are waited for; `compiled_work.py`
steps between movements as functions that `torch.compile` makes; `reused_memory.py` which of them
write where an operand was.
"""
