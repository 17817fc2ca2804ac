"""Pipelines: the order in which ranks run the stages of a function, micro-batch by micro-batch.

`schedule.py` has schedules and their timetables. `pipeline.py` runs them: `stages.py` has the
passes of a stage and a step of all stages, `boundaries.py` the messages between processes.
"""
