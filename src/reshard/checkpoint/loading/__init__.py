"""Loading arrays of checkpoints on disk, and checkpoints of arrays in memory.

`arrays` fills one rank's arrays of any layout; `request` finds the layouts by a mesh and rules, a
recipe or a strategy; `rank_arrays` describes the arrays of ranks as a checkpoint; `background`
loads and converts while the program goes on.
"""
