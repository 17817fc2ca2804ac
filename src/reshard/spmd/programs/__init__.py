"""Programs: functions of arrays in shards that are traced once and run again and again.

`jit.py` is the front. `simplification.py` leaves out of a recorded function what is there twice or
is not needed; `prepared_program.py` has what is left as calls of local kernels and movements.
`control_flow.py` has loops and branches, whose bodies are `traced_function.py`s.
`own_operators.py` makes operators of local functions.
`pipelines/` has the orders in which ranks work on stages.
"""
