"""JSON documents of layouts, plans and jobs.

Start at `serialization` (`to_json`, `from_json`). A layout and a plan are written by `document`, a
job by `job_document`, and their columns of numbers in the short form of `number_columns`.
"""
