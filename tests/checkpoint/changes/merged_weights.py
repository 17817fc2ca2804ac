"""How far merged weights are from others."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard import checkpoint
from reshard.layout import Layout


class Difference(NamedTuple):
    """How many elements differ, of how many, and by what part of the tensor's greatest absolute
    value at most."""

    differing: int
    elements: int
    of_greatest: float


def compare_weights(found: Path, expected: Path) -> Difference:
    """The difference of two checkpoints of the same names and types of at most 32 bits."""
    ours, theirs = checkpoint.open(found), checkpoint.open(expected)
    assert {name: tensor.dtype for name, tensor in ours.tensors.items()} == {
        name: tensor.dtype for name, tensor in theirs.tensors.items()
    }
    layouts = {name: Layout.whole(tensor.shape, [0], 1) for name, tensor in theirs.tensors.items()}
    # As float32, which holds the narrower types exactly and needs no package for them.
    arrays = [checkpoint.load(one, layouts, dtype="fp32") for one in (ours, theirs)]
    differing = elements = 0
    of_greatest = 0.0
    for name in theirs:
        a, b = (one[name].astype(np.float64) for one in arrays)
        differing += int((a != b).sum())
        elements += a.size
        distance = np.abs(a - b).max(initial=0)
        of_greatest = max(of_greatest, float(distance / max(np.abs(b).max(initial=0), 1e-30)))
    return Difference(differing, elements, of_greatest)
