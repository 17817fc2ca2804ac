"""Quantised weights: their stored tensors found by name, and cut together at their groups.

    methods       the table: which tensors each method stores, and what their dimensions are
    weights       the quantised weights of a checkpoint, found by names, shapes and config.json
    group_cuts    one dimension: a cut moved to whole groups, and what stored tensors have of it
    folding       shardings of logical weights in place of their stored tensors, and back

Start at `methods`. To add a method, add a row there.
"""
