"""Values of elements: conversions between types, and of quantised weights, in NumPy.

    casting       between floating-point types, correctly rounded
    float8        8-bit and 4-bit floating point: tables of values, and rounding to them
    block_scaling quantisation with a scale for each block, of NumPy arrays and of torch tensors
    decoding      values of quantised weights from their stored tensors

Start at `casting`. Types that NumPy lacks (bfloat16, float8) are calculated on their bits, so that
nothing but NumPy is needed.
"""
