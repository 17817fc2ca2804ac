"""Sharded arrays, and the functions that create them.

`sharded_array.py` has the class, `array_operators.py` its operators and `numpy_protocols.py`
NumPy's functions on it. `creation.py` and `fft.py` (frequencies) create arrays.
"""
