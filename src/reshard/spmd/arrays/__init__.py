"""Arrays in shards, and what makes one of data or of nothing.

`sharded_array.py` has the class; `array_operators.py` its operators and `numpy_protocols.py`
NumPy's functions on it; `creation.py` and `fft.py` (frequencies) make arrays.
"""
