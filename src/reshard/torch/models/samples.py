"""Samples and digests of tensors, by which ranks find out whether their copies are equal.

A plain tensor counts as whole on every rank that has it. A sample of what it has tells ranks with
different parts apart before anything moves; a digest of all of it tells at any time.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from reshard.torch.exchange.packing.pieces import cut

# How much of a tensor a sample has: at least so many indices of each dimension, far apart.
_SAMPLED = 8
_DIGEST_BYTES = 8
# What is read at once for a digest.
_AT_ONCE_BYTES = 1 << 24


def sample_of(tensor: torch.Tensor) -> str:
    """A digest of some elements, from all over a tensor.

    >>> sample_of(torch.zeros(4, 4)) == sample_of(torch.zeros(4, 4))
    True
    >>> sample_of(torch.zeros(4, 4)) == sample_of(torch.ones(4, 4))
    False
    """
    steps = tuple(slice(None, None, max(size // _SAMPLED, 1)) for size in tensor.shape)
    return hashlib.blake2b(_bytes_of(tensor[steps]), digest_size=_DIGEST_BYTES).hexdigest()


def digest_of(tensor: torch.Tensor) -> str:
    """A digest of all elements.

    >>> digest_of(torch.arange(6.0)) == digest_of(torch.arange(12.0)[::2] / 2)
    True
    """
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if tensor.numel():
        for part in cut(tensor, _AT_ONCE_BYTES):
            hasher.update(_bytes_of(part))
    return hasher.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    dense = tensor.detach().contiguous().cpu().reshape(-1)
    return dense.view(torch.uint8).numpy().data if dense.numel() else b""
