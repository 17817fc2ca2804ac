"""Tracing: what a function on arrays in shards will do, without doing it.

`trace.py` is the front. `graph_recording.py` records the function on arrays without elements
(`abstract_runner.py`); `memory.py` and `compute.py` count what its operations take; `table.py`,
`page.py` and `document.py` show the record (`trace_record.py`).
"""
