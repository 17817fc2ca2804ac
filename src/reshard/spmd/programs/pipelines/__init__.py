"""Pipelines: in which order ranks work on the stages of a function, microbatch by microbatch.

`schedule.py` has an order as data, and what makes it valid; `timetable.py` when each task runs,
given costs; `orders.py` the orders that are known by name.
"""
