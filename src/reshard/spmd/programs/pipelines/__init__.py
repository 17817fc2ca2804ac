"""Pipelines: in which order ranks work on the stages of a function, microbatch by microbatch.

`schedule.py` has an order as data, and what makes it valid; `timetable.py` when each task runs,
given costs; `orders.py` the orders that are known by name. `pipeline.py` runs them: `stage_run.py`
a step, `stage_passes.py` the passes of a stage, `recorded_stage.py` and `stage_programs.py` these
as programs, `process_run.py` and `stage_boundary.py` steps over processes.
"""
