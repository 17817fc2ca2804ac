"""Execution in this process: an engine that copies, combines and fills arrays.

It takes columns of copies between the cells of two layouts, whatever they come from: `plans.run`
makes them for plans and jobs, `collectives` for programs.

engine  the steps of a run for each tensor; start here
copies  the columns, as NumPy copies that threads share
memory  the arrays that are read and written, checked before anything is copied
arrays  NumPy arrays and torch tensors as memory with arithmetic
"""
