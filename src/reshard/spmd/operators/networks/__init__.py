"""Operators of neural networks.

`layers.py` has softmax, norms and losses; `attention.py` attention and its gradient;
`ring_attention.py` its turns over sequences that are cut; `convolution.py` and `pooling.py` windows
over space, and `halos.py` what moves of space that is cut.
"""
