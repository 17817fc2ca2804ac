"""Tensors of partitions, such as the tokens of experts: `partitioned_tensor` is what users have.

`partitions` says which rank sends which pieces to whom, and exchanges them.
"""
