"""Programs: functions of sharded arrays that are traced once and executed many times.

`jit.py` is the entry point, `auto.py` chooses the shardings of arguments as well
(`input_search.py`). `simplification.py`, `recomputation.py`, `reshard_insertion.py` and
`decomposition.py` are passes over graphs, `overlap.py` estimates their overlap. `program.py`
compiles a graph into steps (`steps.py`, `compiled_work.py`). `control_flow.py` has loops and
branches, whose bodies are `traced_function.py`s, and `eager_operations.py` data-dependent
functions. `custom_ops.py` creates operators from local functions. `pipelines/` has pipeline
schedules.
"""
