"""New checkpoints of DeepSpeed: what goes into which file, and where in flat buffers.

`training_parts` says what a source has, `flat_plans` where parameters lie, `new_states` what is no
tensor; `zero` and `universal` arrange files.
"""
