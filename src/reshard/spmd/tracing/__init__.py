"""Tracing: the operations, data movement, time and memory of a function, without running it.

`trace.py` is the entry point. `graph_recording.py` records the function on arrays without elements
(`abstract_runner.py`). `estimates.py` has the memory and time of operations and their totals;
`table.py`, `page.py` and `document.py` format them.
"""
