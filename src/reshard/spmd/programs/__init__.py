"""Programs: functions of sharded arrays that are traced once and executed many times.

`jit.py` is the entry point. `simplification.py` removes duplicate and unused operations from a
recorded function. `prepared_program.py` turns the rest into calls of local kernels and movements.
`control_flow.py` has loops and branches, whose bodies are `traced_function.py`s. `own_operators.py`
creates custom operators from local functions. `pipelines/` has pipeline schedules.
"""
