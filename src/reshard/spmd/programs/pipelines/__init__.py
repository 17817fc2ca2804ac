"""Pipelines: the order in which ranks run the stages of a function, micro-batch by micro-batch.

`schedule.py` has an order as data, and checks that it is valid; `timetable.py` computes when each
task runs, given costs; `orders.py` has the named orders. `pipeline.py` runs them: `stage_run.py` a
step, `stage_passes.py` the passes of a stage, `recorded_stage.py` and `stage_programs.py` these as
programs, `process_run.py` and `stage_boundary.py` steps over processes.
"""
