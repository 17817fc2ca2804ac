"""Changes of elements while a checkpoint is converted: other types, quantised or not.

    computed      tensors that are computed from others, block by block
    batched       blocks of several tensors together: moved, cast or computed
    casts         elements in another floating-point type
    dequantized   weights from their quantised tensors
    quantized     weights in float8 with scales
    merged        weights with low-rank changes, and `adapters`, which have these
    planning      which tensors change, and what config.json says then

Start at `planning`.
"""
