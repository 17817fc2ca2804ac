"""Bare files of ranks: one file for each, as training programs save them without a format.

`file_names` tells which files are of which rank; `local_parts` reads DTensors and sharded tensors;
`reader` joins the parts of all ranks; `plain_cuts` finds how plain tensors were cut, by rules that
the user gives; `writing` writes DTensors. Start with `format`.
"""
