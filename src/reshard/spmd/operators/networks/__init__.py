"""Operators of neural networks.

`layers.py` has softmax, norms and losses; `attention.py` attention and its gradient;
`ring_attention.py` its steps over sharded sequences; `convolution.py` and `pooling.py` windows over
spatial dimensions, and `halos.py` the halo exchange for sharded ones.
"""
