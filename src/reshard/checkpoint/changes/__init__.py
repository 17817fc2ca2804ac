"""Changes of elements during a conversion: other types, quantisation, merged adapters.

::

    computed_tensors   tensors computed from others, block by block; casts, constants
    quantization       weights from quantised tensors; weights in float8 with scales
    adapters           weights with low-rank adapters merged in
    source_digests     recorded digests of sources that are read in other blocks
    planning           which tensors change, and config.json afterwards

Start with `planning`.
"""
