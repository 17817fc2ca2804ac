"""Sharded arrays, and the functions that create them.

`sharded_array.py` has the class, its operators and NumPy's functions on it.
`creation.py`, `random.py` and `fft.py` (frequencies) create arrays.
`argument_tree.py` has arrays in lists, tuples and dictionaries. `saved_arrays.py` saves these as
checkpoints and loads them; with several processes, each writes its part by `box_save.py`.
"""
