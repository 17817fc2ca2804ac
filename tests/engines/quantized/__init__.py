"""Quantised weights by the libraries that define their formats.

    library     formats: made and dequantised by transformers, compressed-tensors, ModelOpt...
    records     what they made, in `tests/golden/engines/quantized`, and its cuts

`python -m engines.quantized` writes the records.
"""
