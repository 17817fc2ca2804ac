"""Tracing: the operations, data movement, time and memory of a function, without running it.

`trace.py` is the entry point. `graph_recording.py` records the function on arrays without elements
(`abstract_runner.py`). `memory.py` and `compute.py` estimate the memory and time of its operations.
`table.py`, `page.py` and `document.py` format the record (`trace_record.py`).
"""
