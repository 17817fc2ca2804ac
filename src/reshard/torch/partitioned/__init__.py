"""Tensors of partitions, such as the tokens of experts: `partitioned_tensor` is the public class.

`partitions` determines which rank sends which pieces to which rank, and exchanges them.
"""
