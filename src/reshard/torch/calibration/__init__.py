"""Calibration of a cost model on the ranks of a running job.

`calibration` is where to start: it measures the `cases`, and fits a preset to what they took.
"""
