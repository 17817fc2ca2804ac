"""Coupled cuts: what an operator needs cut together, and whether ranks can compute with it.

    coupling        what a recipe declares: units, and what they share
    cut_marks       which dimensions of a rule are cut by such a name
    held_units      what each rank holds of a block of a tensor, in units
    held_blocks     the blocks of a tensor
    computability   what is wrong with what ranks hold of one operator
    inspection      all operators of a model
    allowances      what a user may accept

Start at `coupling`, then `inspection`.
"""
