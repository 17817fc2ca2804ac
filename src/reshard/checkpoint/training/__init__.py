"""Training state in checkpoints: optimizer state, hyper-parameters and counters.

state            the canonical form, and the styles of programs
translation      a state in the style of another program
state_sharding   layouts of optimizer state, from the layouts of parameters
plain_state      values, and groups of hyper-parameters
model_sets       several models in a checkpoint
"""
